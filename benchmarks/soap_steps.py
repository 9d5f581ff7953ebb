"""What a training step with `SOAP` costs beside one with AdamW, in CPU time.

    python -m benchmarks.soap_steps

A character GPT is trained on random tokens by AdamW, fused and with ``foreach``, and by
`SOAP` at its defaults.  The methods take turns in one process and on one thread, ten steps
at a time, of which one renews the bases; each method's time is the least of many turns, and
the ratio the median of those of single turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

CASES = {
    "64": {"width": 64, "layers": 2, "context": 64, "batch": 32},
    "128": {"width": 128, "layers": 3, "context": 64, "batch": 32},
    "256": {"width": 256, "layers": 4, "context": 128, "batch": 64},
}
TURN = 10
VOCABULARY = 96


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| width | tokens | AdamW fused, ms | foreach | SOAP | SOAP / AdamW |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.cases:
        case = CASES[name]
        times = measured(case, options.turns)
        least = {method: min(ts) / TURN * 1e3 for method, ts in times.items()}
        fastest = min(("fused", "foreach"), key=least.__getitem__)
        pairs = zip(times["soap"], times[fastest], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        tokens = case["context"] * case["batch"]
        row = " | ".join(f"{least[m]:.1f}" for m in ("fused", "foreach", "soap"))
        print(f"| {name} | {tokens} | {row} | {ratio:.2f} |", flush=True)


def measured(case: dict[str, int], turns: int, /) -> dict[str, list[float]]:
    """Return the CPU seconds of each turn of each method.

    Parameters
    ----------
    case : dict of str to int
        Width, layers, context and batch.
    turns : int
        Turns after the first, which is not measured.
    """
    import torch

    from kfac_core_shims.torch import SOAP

    torch.set_num_threads(1)
    methods: dict[str, Callable[[Any], Any]] = {
        "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, fused=True),
        "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=3e-3, foreach=True),
        "soap": lambda m: SOAP(m),
    }
    steps = {name: _stepper(make, case) for name, make in methods.items()}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = time.process_time()
            for _ in range(TURN):
                step()
            if turn:
                times[name].append(time.process_time() - start)
    return times


def _stepper(make: Callable[[Any], Any], case: dict[str, int]) -> Callable[[], None]:
    """Return a function that takes one training step."""
    import torch
    from torch.nn import functional as fn

    torch.manual_seed(0)
    model = _gpt(**{n: case[n] for n in ("width", "layers", "context")})
    optimizer = make(model)
    tokens = torch.randint(VOCABULARY, (case["batch"], case["context"] + 1))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        fn.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def _gpt(*, width: int, layers: int, context: int) -> Any:
    """Return a GPT with pre-norm blocks, heads of 16 to 64, and one matrix for q, k, v."""
    import torch
    from torch import nn
    from torch.nn import functional as fn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.project = (
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )
            self.wide, self.narrow = (
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: Any) -> Any:
            N, T, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(N, T, 3, 4, width // 4)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(y.transpose(1, 2).reshape(N, T, width))
            return x + self.narrow(fn.gelu(self.wide(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(context, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            places = torch.arange(ids.shape[1], device=ids.device)
            return self.head(
                self.norm(self.blocks(self.tokens(ids) + self.positions(places)))
            )

    return GPT()


if __name__ == "__main__":
    main()
