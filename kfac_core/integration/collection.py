"""Statistics of a network over a data set: layers by parts, saved as it goes, resumed.

Conventions.  The curvature is that of one example's negative log-likelihood, summed over
its rows (tokens, positions) and averaged over the N examples of the data set.  A framework
gives a *capture*: what makes batches of layers from a batch of data.  Everything else is
here.  A block of `kfac_core.EKFAC` takes the data twice: once for its factors, once for the
second moments in their bases.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import array_api_compat
import numpy as np

from kfac_core import constraints, errors
from kfac_core.approximations.ekfac import EKFAC
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.options import UpdateOptions
from kfac_core.approximations.second_moment import Diagonal, Full
from kfac_core.array import Array, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.selection import asarray
from kfac_core.block import Block
from kfac_core.checkpoint.reading import join_checkpoints, load_checkpoint, read_header
from kfac_core.checkpoint.writing import save_checkpoint
from kfac_core.distributed.agreement import Agreement
from kfac_core.distributed.communicator import Communicator
from kfac_core.estimator import Estimator
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import BatchLike
from kfac_core.layers.layer import Layer
from kfac_core.losses.modes import EstimationMode, source_reduction_of
from kfac_core.stages import rebase_block, update_block
from kfac_core.state import BlockState, NetworkState

_SLICES, _SLICE = 128, 2**14
"""In how many slices processes exchange a large sum, and the least length of one."""

Blocks: TypeAlias = Mapping[str, Block]

Capture: TypeAlias = Callable[
    [Blocks], AbstractContextManager[Callable[[Any, int], tuple[Iterable[Any], int]]]
]
"""For some blocks a context with ``(batch, seed) -> (parts, examples)``: mappings of blocks
to `kfac_core.Batch`, of the summed loss, and the number of examples."""


@dataclass
class Collected:
    """The statistics of a network's blocks over a data set.

    Parameters
    ----------
    estimator : kfac_core.Estimator
        Estimator of the blocks; it holds the statistics, unless they are in a file.
    examples : int
        N.
    path : Path, optional
        The file, read when the statistics are first asked for.
    backend : str, optional
        Where its arrays go; see `kfac_core.load_checkpoint`.
    origin : mapping of str to str
        What the file says that it was collected from; see `collect_statistics`.
    """

    estimator: Estimator
    examples: int
    path: Path | None = None
    backend: str | None = None
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by name."""
        return self.estimator.blocks

    @classmethod
    def read(
        cls,
        layers: Mapping[str, Layer],
        path: str | os.PathLike[str],
        /,
        *,
        backend: str | None = None,
    ) -> Collected:
        """Read a file, for the layers of its network.

        Parameters
        ----------
        layers : mapping of str to Layer
            At least those of the file's blocks.
        path : path-like
            Checkpoint from `collect_statistics`.
        backend : str, optional
            ``name[:device]`` of the arrays.

        Returns
        -------
        Collected
            Its arrays are read when they are asked for.

        Raises
        ------
        StateError
            For a file that was not collected, or that is of other layers.
        """
        document = read_header(path)["document"]
        about = document.get("about") or {}
        examples = about.get("examples")
        if "collected" in about:
            raise errors.StateError(
                f"{path}: a part of a run that was not finished. Call `collect` again with "
                "the path and the options of that run."
            )
        state = document["state"]
        missing = state["blocks"].keys() - layers.keys()
        if examples is None or missing:
            raise errors.StateError(
                f"{path}: expected a file that `collect` wrote for this network"
                + (f", got blocks {sorted(missing)}." if missing else ".")
            )
        kinds = {k.name: k for k in (Kronecker, EKFAC, Full, Diagonal)}
        blocks = {}
        for name, saved in state["blocks"].items():
            options = dict(saved["approximation"])
            blocks[name] = Block(layers[name], kinds[options.pop("name")](**options))
        conventions = state["conventions"]
        estimator = Estimator(
            blocks,
            reduction="sum",
            sources=conventions["sources"],
            mode=conventions["mode"],
        )
        origin = about.get("origin") or {}
        return cls(estimator, examples, Path(path), backend, origin)

    @cached_property
    def statistics(self) -> dict[str, Statistics]:
        """The statistics by name of the block."""
        if self.path is not None:
            load_checkpoint(self.path, self.estimator, backend=self.backend)
        state = self.estimator.state
        return {name: state[name].known_statistics(name) for name in self.blocks}


def with_moments(block: Block, /) -> Block:
    """Return a block of `EKFAC` with the factors of a block of `Kronecker`.

    Parameters
    ----------
    block : Block
        Block of any approximation; of others than `Kronecker` it stays as it is.

    Returns
    -------
    Block
        The block whose second moments are taken too.
    """
    kind = block.approximation
    if not isinstance(kind, Kronecker):
        return block
    return Block(block.layer, EKFAC(**dataclasses.asdict(kind)))


def collect_statistics(
    blocks: Blocks,
    capture: Capture,
    loader: Iterable[Any],
    /,
    *,
    fisher: EstimationMode,
    path: str | os.PathLike[str] | None = None,
    origin: Mapping[str, str] | None = None,
    backend: str | None = None,
    max_elements: int | None = None,
    save_every: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    communicator: Communicator | None = None,
) -> Collected:
    """Return the statistics of a data set.

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks of the network.
    capture : Capture
        Runs the network.
    loader : iterable
        Batches; gone through once or twice for each part, and the same each time.
    fisher : EstimationMode
        Which vectors `capture` backpropagates.
    path : path-like, optional
        Checkpoint that the result is written to.  Where it exists already and has the same
        blocks, `fisher` and `origin`, it is the result; unfinished parts beside it are
        resumed, to the bit, by as many processes.
    origin : mapping of str to str, optional
        What the result depends on besides blocks and `fisher`, such as a digest of the
        weights; noted in files, and that of the first process for all.
    backend : str, optional
        ``name[:device]`` that files are read to.
    max_elements : int, optional
        Bound on the numbers in the statistics of the blocks that are taken together; others
        wait for a further pass over the data.  Without it there is one part.
    save_every : int, optional
        Batches between saved states.  Without it only finished parts are saved.
    progress : callable, optional
        Called with the number of batches done and of those that there are; the latter is 0
        for a loader without a length.
    communicator : Communicator, optional
        Processes, each with a loader of its own share of the data; they end with the sums
        over all.

    Returns
    -------
    Collected
        Statistics of all blocks.

    Raises
    ------
    ConventionError
        For several parts, or `save_every`, without a `path`; for a loader that gives other
        batches the second time.
    NotReadyError
        If a block saw no example, or a process no batch; on all processes.
    StateError
        For a file at `path`, or of an unfinished run, of other blocks, options or origin.
    """
    for name, number in (("max_elements", max_elements), ("save_every", save_every)):
        optional = constraints.optional(constraints.COUNT)
        constraints.require_range(name, number, optional)
    estimator = functools.partial(
        Estimator,
        reduction="sum",
        decay=1.0,
        sources=source_reduction_of(fisher),
        mode=fisher,
    )
    target = None if path is None else Path(path)
    origin = {
        "layers or approximations": repr(blocks),
        "fisher": fisher,
        **(origin or {}),
    }
    if target is not None:
        origin = _shared_origin(origin, communicator)
    if target is not None and target.exists():
        about = read_header(target)["document"].get("about") or {}
        if "examples" not in about:
            raise errors.StateError(
                f"{target}: not written by `collect`. Pass another path, or remove the "
                "file."
            )
        if (misfit := _misfit(target, origin)) is not None:
            raise misfit
        return Collected(estimator(blocks), about["examples"], target, backend)
    parts = [*_parts(blocks, max_elements)]
    if target is None and (len(parts) > 1 or save_every is not None):
        raise errors.ConventionError(
            "Layers in parts and saved states are written to files: pass a `path`."
        )
    stages = [2 if any(map(_has_moments, part.values())) else 1 for part in parts]
    length = len(loader) if isinstance(loader, Sized) else 0
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    runs: list[_Run] = []
    for number, part in enumerate(parts):
        file = None
        if target is not None:
            # Sums that another number of processes saved are of other shares of the data.
            rank = ""
            if communicator is not None:
                rank = f".{communicator.rank}of{communicator.size}"
            file = target.with_name(f"{target.name}.part{number}{rank}")
        run = _Run(part, capture, loader, estimator, file, backend)
        run.save_every, run.communicator = save_every, communicator
        run.origin = origin
        run.is_bounded = max_elements is not None
        if progress is not None:
            run.progress = _Offset(progress, sum(stages[:number]), sum(stages), length)
        run.finish()
        if runs:
            _require_same_examples(run.examples, runs[0].examples)
        if target is not None:
            run.statistics = {}  # In the file; the next part needs the memory.
        runs.append(run)
    examples = runs[0].examples
    if target is None:
        return Collected(runs[0].holding(), examples)
    with runs[0].together("collect: the file"):
        if communicator is None or communicator.rank == 0:
            files = [run.saved(2) for run in runs]
            about = {"examples": examples, "origin": origin}
            join_checkpoints(target, files, about=about)
    # Also those that a killed run with another number of processes left.
    for file in target.parent.glob(f"{glob.escape(target.name)}.part[0-9]*"):
        file.unlink(missing_ok=True)
    return Collected(estimator(blocks), examples, target, backend)


def digest_of_arrays(arrays: Iterable[tuple[str, Any]], /) -> str:
    """Return a digest of arrays, each with its name.

    Parameters
    ----------
    arrays : iterable of (str, numpy.ndarray)
        Names and arrays, in the order that counts.

    Returns
    -------
    str
        SHA-256 of names, dtypes, shapes and values, in hexadecimal.
    """
    digest = hashlib.sha256()
    for name, x in arrays:
        digest.update(f"{name} {x.dtype} {x.shape};".encode())
        digest.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _shared_origin(
    origin: Mapping[str, str], communicator: Communicator | None
) -> dict[str, str]:
    """Return the origin of the first process, without addresses and long texts."""
    plain = {}
    for key, text in origin.items():
        text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
        short = len(text) <= 64
        plain[key] = text if short else hashlib.sha256(text.encode()).hexdigest()
    if communicator is not None:
        # Of replicas, running statistics may differ.
        plain = json.loads(Agreement(communicator).texts(json.dumps(plain))[0])
    return plain


def _misfit(path: Path, origin: Mapping[str, str]) -> errors.StateError | None:
    """Return the error for a file of another origin, if it is noted."""
    about = read_header(path)["document"].get("about") or {}
    noted = about.get("origin") or {}
    others = [k for k, text in origin.items() if noted.get(k, text) != text]
    if not others:
        return None
    return errors.StateError(
        f"{path}: was collected with other {', other '.join(others)}. Delete the file, or "
        "pass another `path`, to collect anew."
    )


def _elements_of(block: Block, /) -> int:
    """Return about how many numbers the statistics of a block are."""
    n, m = block.layer.matrix_shape
    kind = block.approximation
    if kind.name == "full":
        return (n * m) ** 2
    sides = {"input": n, "output": m // block.layer.groups}
    full = [k for side, k in sides.items() if getattr(kind, side, "") == "full"]
    factors = block.layer.groups * sum(k * k for k in full) + n + m
    return 2 * factors + n * m if kind.has_bases else factors


def _require_same_examples(count: int, expected: int) -> None:
    if count != expected:
        raise errors.ConventionError(
            f"Expected a loader that gives the same batches each time, got {count} "
            f"examples after {expected}. Give a list or a DataLoader that does not "
            "shuffle, not an iterator."
        )


@dataclass
class _Offset:
    """Progress of one part among others."""

    progress: Callable[[int, int], None]
    before: int
    stages: int
    length: int

    def __call__(self, stage: int, batches: int) -> None:
        """Report the batches of a stage of this part."""
        done = (self.before + stage) * self.length + batches
        self.progress(done, self.stages * self.length)


@dataclass
class _Run:
    """The statistics of blocks that are taken together."""

    blocks: Blocks
    capture: Capture
    loader: Iterable[Any]
    estimator: Callable[[Blocks], Estimator]
    file: Path | None
    backend: str | None
    save_every: int | None = None
    communicator: Communicator | None = None
    is_bounded: bool = False  # Whether `max_elements` bounds the memory.
    progress: Callable[[int, int], None] | None = None
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stage: int = 0
    batches: int = 0
    counted: int = 0  # Examples that this process has seen in this stage.
    examples: int = 0

    def __post_init__(self) -> None:
        self.statistics: dict[str, Statistics] = {}

    def finish(self) -> None:
        """Take the factors, and then the moments in their bases, from where it stood."""
        self._resume()
        moving = {n: b for n, b in self.blocks.items() if _has_moments(b)}
        if self.stage == 0:
            blocks = self._stage_blocks()
            self._take(blocks, frozenset())
            self._finish_sums(blocks, {"input", "output", "repeats", "block"})
            self.statistics = self._rebased()
            self.stage, self.batches, self.counted = 1, 0, 0
            if moving:
                self._save_stage()
        if self.stage == 1:
            if moving:
                self._take(moving, frozenset({"input", "output"}))
                self._finish_sums(moving, {"block"})
            self.stage = 2
            self._save_stage()

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Raise an error of one process on all, which wait for each other."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self.communicator is None:
                raise
            error = raised
        if self.communicator is not None:
            Agreement(self.communicator).vote(step, error=error)

    def saved(self, stage: int) -> Path:
        """Return the file of a stage; 2 is the last."""
        assert self.file is not None
        return self.file.with_name(f"{self.file.name}.{stage}")

    def holding(self) -> Estimator:
        """Return an estimator that holds the statistics."""
        estimator = self.estimator(self._stage_blocks())
        state = dict.fromkeys(self.blocks, BlockState())
        for name, statistics in self.statistics.items():
            # The state counts one update of weight 1 for each row.
            rows = max(float(a.weight) for a in statistics.averages.values())
            age = 0 if statistics.bases else -1
            state[name] = BlockState(statistics, updates=int(rows), basis_age=age)
        estimator.state = NetworkState(state)
        return estimator

    def _stage_blocks(self) -> dict[str, Block]:
        """Return the blocks as they are in this stage; first without moments."""
        if self.stage:
            return dict(self.blocks)
        return {
            name: Block(block.layer, block.approximation.factors)
            if isinstance(block.approximation, EKFAC)
            else block
            for name, block in self.blocks.items()
        }

    def _take(self, blocks: Blocks, skip: frozenset[str]) -> None:
        """Read the data, and add the rows of each block."""
        conventions = self.estimator(blocks).conventions
        options = UpdateOptions(conventions, 1.0, None, skip=skip, overwrite=True)
        rank = 0 if self.communicator is None else self.communicator.rank
        reading = self.together(f"collect: the data, stage {self.stage}")
        with reading, self.capture(blocks) as passes:
            # A resumed run skips the batches that its file has, so the loader must not
            # shuffle.
            remaining = itertools.islice(self.loader, self.batches, None)
            for k, batch in enumerate(remaining, self.batches):
                # A seed for each rank, stage and batch: resuming draws the same labels,
                # and the second pass of EKFAC draws others than the first.
                seed = (rank << 64) + (self.stage << 48) + k
                count = self._add(*passes(batch, seed), blocks, options)
                self.batches = k + 1
                self.counted += count
                if self.save_every is not None and self.batches % self.save_every == 0:
                    self._save()
                if self.progress is not None:
                    self.progress(self.stage, self.batches)

    def _add(
        self, parts: Iterable[Any], count: int, blocks: Blocks, options: UpdateOptions
    ) -> int:
        """Add the rows of one batch, which no variable holds during the next pass."""
        for part in parts:
            for name in part.keys() & blocks.keys():
                self._add_rows(name, blocks[name], part[name], options)
        return count

    def _add_rows(
        self, name: str, block: Block, batch: BatchLike, options: UpdateOptions
    ) -> None:
        old = self.statistics.get(name)
        if old is None:
            use: Any = batch[0] if isinstance(batch, list | tuple) else batch
            old = block.initial(use.output_grads)
        new = update_block(block, old, batch, options, name=name)
        if options.skip:
            # The pass over the factors has counted the examples already.
            same = {"repeats": old.averages["repeats"]}
            new = replaced(new, averages={**new.averages, **same})
        self.statistics[name] = new

    def _finish_sums(self, blocks: Blocks, names: set[str]) -> None:
        """Add up the sums of all processes, and divide by the examples of the network.

        A layer may see more or fewer examples than the network: tokens of an expert.
        """
        count = self._count()
        if self.stage == 0:
            self.examples = count
        _require_same_examples(count, self.examples)
        like = next(s.like for s in self.statistics.values())
        for name, block in blocks.items():
            # Another process may have seen rows of a layer that this one has not.
            statistics = self.statistics.get(name)
            if statistics is None:
                statistics = block.initial(like)
            averages, rows = dict(statistics.averages), 0.0
            # Sorted, as the order of a set differs between processes.
            for key in sorted(names & averages.keys()):
                total: Average = map_structure(self._total, averages[key])
                rows = max(rows, float(total.weight))
                if key in ("repeats", "block"):
                    examples = total.weight * 0 + self.examples
                    total = replaced(total, weight=examples)
                averages[key] = total
            if not rows:
                raise errors.NotReadyError(
                    f"Block {name!r} saw no example: nothing in the data reaches this "
                    "layer. Leave the layer out, or give other data."
                )
            self.statistics[name] = replaced(statistics, averages=averages)

    def _count(self) -> int:
        """Return how many examples all processes have seen in this stage."""
        # In two digits, since float32 has no odd numbers above 2^24.
        digits = [*divmod(self.counted, 2**20), not self.counted]
        counts = asarray(np.asarray(digits, np.float32), backend=self.backend)
        high, low, empty = (int(k) for k in self._total(counts))
        if empty and not self.stage:
            raise errors.NotReadyError(
                f"The loader gave no batch on {empty} process(es): it is empty, or an "
                "iterator that was read before."
            )
        return high * 2**20 + low

    def _total(self, x: Array, share: int = 1) -> Array:
        """Return the sum over processes of `share` times an array, whose memory it takes.

        In slices, since engines need memory beside what they add up.
        """
        if self.communicator is None:
            return x
        if x.ndim < 2 or not array_api_compat.is_writeable_array(x):
            return self._reduced(x if share == 1 else x * share)
        xp, view = ns.own_namespace(x), x
        # Slices along the axis that is contiguous would be copied once more.  Every
        # process must cut alike, whatever order its own matrix has.
        order = float(not ns.is_row_major(x))
        columns = xp.full((1,), order, dtype=x.dtype, device=ns.device_of(x))
        if int(self._reduced(columns)[0]) == self.communicator.size:
            view = xp.matrix_transpose(x)
        size = max(_SLICE, math.prod(x.shape) // _SLICES)
        step = max(1, size // max(1, math.prod(view.shape[1:])))
        for start in range(0, view.shape[0], step):
            piece = view[start : start + step, ...]
            if share != 1:
                piece *= share
            piece[...] = self._reduced(piece, overwrite=True)
        return x

    def _reduced(self, x: Array, overwrite: bool = False) -> Array:
        assert self.communicator is not None, "there are several processes"
        xp = ns.own_namespace(x)
        flat = xp.reshape(x, (-1,))
        total = self.communicator.all_reduce(flat, overwrite=overwrite).wait()
        return xp.reshape(total, x.shape)

    def _rebased(self) -> dict[str, Statistics]:
        """Return the statistics with the bases of their factors, and zero moments."""
        by_block = {}
        for name, block in self.blocks.items():
            statistics = self.statistics[name]
            if isinstance(block.approximation, EKFAC):
                # In place it needs little memory, and some times as long.
                statistics = rebase_block(
                    block, statistics, "zero", "raise", overwrite=self.is_bounded
                )
                if self.communicator is not None:
                    # Libraries may return bases of equal matrices with other signs.
                    first = 1 if self.communicator.rank == 0 else 0
                    bases = map_structure(
                        lambda x, c=first: self._total(x, c), statistics.bases
                    )
                    statistics = replaced(statistics, bases=bases)
            by_block[name] = statistics
        return by_block

    def _save(self) -> None:
        if self.file is None:
            return
        about = {
            "stage": self.stage,
            "batches": self.batches,
            "collected": self.counted,
            "of": self.examples,
            "origin": self.origin,
        }
        path = self.saved(self.stage)
        save_checkpoint(path, self.holding(), parts="statistics", about=about)

    def _save_stage(self) -> None:
        """Save what a stage ends with, which has the sums over all processes.

        Where one is killed, all go on at the same stage: the files of the stage before
        stay until each has that of this one.
        """
        if self.file is None:
            return
        with self.together(f"collect: the file of stage {self.stage}"):
            self._save()
        for stage in range(self.stage):
            self.saved(stage).unlink(missing_ok=True)

    def _resume(self) -> None:
        if self.file is None:
            return
        ended = np.asarray([self.saved(k).exists() for k in (1, 2)], np.float32)
        common = self._total(asarray(ended, backend=self.backend))
        size = 1 if self.communicator is None else self.communicator.size
        stages = [k for k in (1, 2) if float(common[k - 1]) == size]
        path = self.saved(max(stages, default=0))
        with self.together("collect: resume"):
            if path.exists():
                self._load(path)

    def _load(self, path: Path) -> None:
        """Go on from what a file has."""
        if (misfit := _misfit(path, self.origin)) is not None:
            raise misfit
        about = read_header(path)["document"]["about"]
        self.stage, self.batches = about["stage"], about["batches"]
        self.counted, self.examples = about["collected"], about["of"]
        estimator = self.estimator(self._stage_blocks())
        try:
            load_checkpoint(path, estimator, backend=self.backend)
        except errors.StateError as error:
            raise errors.StateError(
                f"{error} The file is of an unfinished run of other options, or of another "
                "model: call `collect` as it was called then, or remove the file."
            ) from None
        self.statistics = {
            name: block.statistics
            for name, block in estimator.state.blocks.items()
            if block.statistics is not None
        }


def _parts(blocks: Blocks, max_elements: int | None) -> Iterator[dict[str, Block]]:
    """Yield blocks together as far as the bound allows, in their order."""
    part: dict[str, Block] = {}
    size = 0
    for name, block in blocks.items():
        elements = _elements_of(block)
        if part and max_elements is not None and size + elements > max_elements:
            yield part
            part, size = {}, 0
        part[name] = block
        size += elements
    yield part


def _has_moments(block: Block) -> bool:
    return isinstance(block.approximation, EKFAC)
