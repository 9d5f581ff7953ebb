"""K-FAC in the training step of a Keras model.

The model is run once more with its layers tapped, where statistics are due.  On PyTorch the
estimator holds the state.  On JAX a step of ``fit`` is one program, compiled by Keras, and
the state is kept in variables of the model's optimizer, so that Keras carries it.

Conventions.  The curvature is that of the mean of the compiled losses over the R rows of
the outputs; a layer that saw N examples has its g multiplied by ``sqrt(N / R)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, Unpack

import keras
from keras import ops

import kfac_core as kc
from kfac_core_shims.keras import layers, losses, private, taps

BACKENDS = "torch", "jax"

_DEFAULTS = kc.integration.defaults

Likelihood: TypeAlias = str | kc.losses.Loss | kc.integration.RowLoss


class KFAC(kc.integration.NaturalGradient):
    r"""K-FAC for a built Keras model: natural gradients for its own optimizer.

    After ``KFAC(model)``, ``model.fit`` and ``model.train_on_batch`` give

    .. math:: \nu P G, \qquad
        \nu = \min\left(1, \sqrt{\kappa / (\eta^2 \, G \cdot P G)}\right)

    in the place of the gradient G to the optimizer, with P the inverse of the damped
    curvature, kappa the `kl_clip` and eta the optimizer's learning rate.  `remove` undoes
    it.

    Parameters
    ----------
    model : keras.Model
        Built, and compiled before; with ``jit_compile=False`` on PyTorch.
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss, RowLoss or list, optional
        Likelihood of one row of outputs, or a list for several outputs; by default that of
        the compiled losses.  Probabilities at the end of a model are read as the losses
        read them.  Needed by a model with a ``compute_loss`` or ``train_step`` of its own.
    damping : float or callable of int
        Damping of the next refresh.  A callable, here and below, takes the number of steps
        so far, which is traced in ``fit`` on JAX.
    update_every, refresh_every : int or callable of int
        Steps between statistics, and between factorizations.
    kl_clip : float or callable of int, optional
        Bound on the step; None for none.

    Other Parameters
    ----------------
    reduction : {"mean", "sum"}, optional
        Reduction over the rows of outputs: ``"mean"`` for each of Keras's means, ``"sum"``
        for "sum".  By default that of the compiled losses, or ``"mean"``.
    fisher : {"gradients", "exact", "empirical", ...}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of them (one
        backward pass for each; random signs of rows make it right in expectation where
        layers mix these), ``"empirical"`` takes the targets of the data; see
        `kfac_core.losses.EstimationMode`.
    decay : float or callable of int
        Factor on the old statistics at each update.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    execution : Execution, Distributed or Executor, optional
        How blocks are computed; by default one after the other on PyTorch, and as one
        program on JAX.
    **options
        Further options of `kfac_core.Estimator`: ``averaging``, ``precision``,
        ``coupling``, and ``refreshing``, by default ``Refreshing(keep_matrices=False)``.

    Attributes
    ----------
    sites : dict of str to Site
        Blocks by name, with their layers and variables.
    skipped : dict of str to str
        Layers with trained variables in no block, by name, and their kinds; the gradients
        of these are unchanged.

    Raises
    ------
    ConventionError
        For options out of range, and those that do not agree with the compiled losses.
    UnsupportedError
        For a model, an optimizer or a backend that cannot be used.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from kfac_core_shims.keras import KFAC
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    >>> kfac = KFAC(model)
    >>> x, y = np.random.normal(size=(32, 4)), np.arange(32) % 3
    >>> history = model.fit(x, y, verbose=0)
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        likelihood: Likelihood | Sequence[Likelihood] | None = None,
        damping: kc.integration.Schedule = _DEFAULTS.DAMPING,
        update_every: kc.integration.Interval = _DEFAULTS.UPDATE_EVERY,
        refresh_every: kc.integration.Interval = _DEFAULTS.REFRESH_EVERY,
        kl_clip: kc.integration.Schedule | None = _DEFAULTS.KL_CLIP,
        reduction: Literal["mean", "sum"] | None = None,
        fisher: kc.losses.EstimationMode = "gradients",
        decay: kc.integration.Schedule = _DEFAULTS.DECAY,
        damping_rule: kc.damping.DampingRule = _DEFAULTS.DAMPING_RULE,
        execution: kc.Execution
        | kc.distributed.Distributed
        | kc.execution.Executor
        | None = None,
        **options: Unpack[kc.integration.EstimatorOptions],
    ) -> None:
        self._jax = keras.backend.backend() == "jax"
        if keras.backend.backend() not in BACKENDS:
            raise kc.UnsupportedError(
                f"KERAS_BACKEND={keras.backend.backend()!r} has no K-FAC; choose one of "
                f"{BACKENDS}."
            )
        kc.integration.require_estimation(fisher=fisher)
        sources = kc.losses.source_reduction_of(fisher)
        self.model, self.likelihood = model, likelihood
        self._find_sites()
        if reduction is None:
            summed = private.compiled_reductions(model) == {"sum"}
            reduction = "sum" if summed else "mean"
        overrides = likelihood is None and losses.own_loss_of(model)
        if overrides or not private.is_compiled(model):
            losses.losses_of(model, likelihood, reduction)  # raises now
        if self._jax and execution is None:
            from kfac_core_shims.jax import compiled

            # Each operation outside of `fit` would else be a program of its own.
            execution = compiled
        estimator = kc.Estimator(
            {name: site.block for name, site in self.sites.items()},
            reduction="sum",
            damping_rule=damping_rule,
            mode=fisher,
            sources=sources,
            execution=execution,
            **({"refreshing": kc.Refreshing(keep_matrices=False)} | options),
        )
        self._variables: list[Any] = []
        # The counter of steps that the estimator's state belongs to, and whether steps of
        # a loop came after it.
        self._seen: Any = None
        self._is_ahead = False
        self._compiling = False
        super().__init__(
            estimator,
            reduction=reduction,
            update_every=update_every,
            refresh_every=refresh_every,
            damping=damping,
            decay=decay,
            kl_clip=kl_clip,
            learning_rate=self._rate,
        )
        self._calls: list[kc.integration.LayerCall] = []
        self._rows: Any = None
        self._factor: float | None = None
        self._attach()

    def __repr__(self) -> str:
        table = kc.integration.coverage_table(self.estimator.blocks, self.skipped)
        return f"KFAC(fisher={self.estimator.mode!r}), {self.steps} steps\n{table}"

    @property
    def estimator(self) -> kc.Estimator:
        """The curvature of the last step that the model's optimizer holds."""
        self._pull()
        return self._estimator

    @estimator.setter
    def estimator(self, estimator: kc.Estimator) -> None:
        self._estimator = estimator

    @property
    def steps(self) -> int:
        """The number of steps made, skipped ones aside."""
        self._pull()
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps

    def observe(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        /,
        *,
        state: Any = None,
    ) -> None:
        """Record a batch for the next `precondition`, in a loop of your own.

        Parameters
        ----------
        x : array or structure of arrays
            The model's inputs.
        y : array or structure of arrays, optional
            The targets, for ``fisher="empirical"``.
        sample_weight : array, optional
            As the loss has it.
        state : pair of lists of array, optional
            The values of ``trainable_variables`` and ``non_trainable_variables``, where a
            loop keeps them outside of the model.
        """
        state = state or [
            [v.value for v in self.model.trainable_variables],
            [v.value for v in self.model.non_trainable_variables],
        ]
        self._calls, self._rows, self._factor = self._captured(
            x, y, sample_weight, state, self.steps
        )
        if not bool(_counts_any(sample_weight)):
            self._rows = 0

    def precondition(self, gradients: Sequence[Any], /) -> list[Any]:
        """Return natural gradients of ``model.trainable_variables``; counts a step.

        Parameters
        ----------
        gradients : sequence of array or None
            In the order of ``model.trainable_variables``.

        Returns
        -------
        list of array or None
            The gradients of variables in no block are unchanged.  The KL clip reads the
            learning rate of the model's optimizer; for another one set `learning_rate`.

        Raises
        ------
        NotReadyError
            If statistics are due and `observe` was not called.
        NotFiniteError
            For a gradient or a row that is not finite; nothing has changed.
        """
        calls, rows, factor = self._calls, self._rows, self._factor
        self._calls, self._rows, self._factor = [], None, None
        directions = self.directions(
            self._vector(gradients), calls, rows=rows, loss_factor=factor
        )
        self._is_ahead = True
        return self._replaced(gradients, directions)

    def remove(self) -> None:
        """Give the model its own training step back."""
        self._pull()
        for name in ("train_step", "make_train_function"):
            vars(self.model).pop(name, None)
        self.model.train_function = None
        added = {id(v) for v in self._variables}
        variables = private.optimizer_variables(self._optimizer())
        variables[:] = [v for v in variables if id(v) not in added]
        for optimizer in (self.model.optimizer, self._optimizer()):
            for name in ("save_own_variables", "load_own_variables"):
                vars(optimizer).pop(name, None)
        self._variables = []

    def save(self, path: Any, /) -> None:
        """Write the curvature, and where in its schedules it is, to a file."""
        kc.save_checkpoint(path, self.estimator, about=self._position())

    def load(self, path: Any, /) -> None:
        """Read what `save` wrote; the next step is as it would have been then.

        Raises
        ------
        StateError
            For another file, or one of another model; nothing has changed then.
        """
        about = kc.checkpoint.read_header(path)["document"].get("about")
        if about is None:
            raise kc.StateError(f"{path}: expected a file that KFAC.save wrote.")
        with self.undone_on_error():
            backend = keras.backend.backend()
            kc.load_checkpoint(path, self._estimator, backend=backend)
            state = self._estimator.state_dict()
            self.load_state_dict({**about, "estimator": state})

    def load_state_dict(
        self, state: Mapping[str, Any], /, *, owned: bool = False
    ) -> None:
        """Restore a state that `state_dict` returned."""
        super().load_state_dict(state, owned=owned)
        self._push()

    # What is found in the model.

    def _find_sites(self) -> None:
        self.sites: dict[str, layers.Site] = {}
        self._parts: dict[int, tuple[Any, dict[str, str]]] = {}
        self.skipped: dict[str, str] = {}
        count, covered = 0, set()
        pairs = list(layers.each_site(self.model))
        for layer, sites in pairs:
            if not sites:
                continue
            # Numbered here: Keras's own names go on counting in the next model.
            layer_name = f"{type(layer).__name__}_{count}"
            names = {
                part: f"{layer_name}/{part}" if part else layer_name for part in sites
            }
            self.sites |= {names[part]: site for part, site in sites.items()}
            self._parts[id(layer)] = layer, names
            count += 1
            for site in sites.values():
                covered |= {id(place.variable) for place in site.places.values()}
        for layer, _ in pairs:
            trained = [v for v in private.own_variables(layer) if v.trainable]
            if any(id(v) not in covered for v in trained):
                self.skipped[layer.name] = type(layer).__name__
        if not self.sites:
            raise kc.UnsupportedError(
                "The model is not built, or K-FAC covers none of its layers. To build "
                "it, add an Input, or call it on a batch."
            )

    @property
    def likelihoods(self) -> tuple[kc.losses.Loss, ...]:  # type: ignore[override]
        """Likelihood of each output."""
        return tuple(loss.row.likelihood for loss in self._losses())

    def _losses(self) -> list[losses.OutputLoss]:
        return losses.losses_of(self.model, self.likelihood, self.reduction)

    # What a batch gives.

    def _captured(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        state: Any,
        step: Any,
    ) -> tuple[list[kc.integration.LayerCall], Any, float]:
        """Return the calls of the layers, R, and what the loss is of the likelihood."""
        x = keras.tree.map_structure(ops.convert_to_tensor, x)
        state = [[ops.stop_gradient(v) for v in group] for group in state]
        training = private.training_option(self.model)
        output_losses = self._losses()
        weights: list[tuple[Any, Any]] = []
        of_samples: list[Any] = []

        def run(tape: taps.Tape) -> list[Any]:
            tapped = [
                (layer, layers.tapped(names, layer, tape))
                for layer, names in self._parts.values()
            ]
            # A layer that is computed again in the backward pass would be tapped twice.
            once = private.recomputed_layers(self.model)
            with taps.shadowed(once), taps.shadowed(tapped):
                outputs = self.model.stateless_call(*state, x, **training)[0]
            natural, weights[:], of_samples[:] = [], [], []
            for loss in output_losses:
                weight_here = sample_weight
                if keras.tree.is_nested(weight_here):
                    weight_here = loss.at(weight_here)
                output = loss.at(outputs)
                z, weight, rows = losses.rows_of(loss, output, weight_here)
                natural.append(z)
                weights.append((weight, rows))
                of_samples.append(losses.sample_weights(weight_here, z))
            return natural

        uses, outputs, pull = taps.run_taped(run)
        rows = weights[0][1]
        factors = [
            loss.multiple(z.shape[-1])
            for loss, z in zip(output_losses, outputs, strict=True)
        ]
        self.outputs = max(z.shape[-1] for z in outputs)
        factor = max(factors)
        if 0 in outputs[0].shape:
            return [], 0, factor
        # Outputs with fewer rows, or a smaller loss, weigh less beside the others.
        vectors = [
            self._vectors(
                loss,
                z,
                weight,
                rows / rows_here * (own_factor / factor),
                step,
                y,
                place,
            )
            for place, (loss, z, (weight, rows_here), own_factor) in enumerate(
                zip(output_losses, outputs, weights, factors, strict=True)
            )
        ]
        calls = [
            kc.integration.LayerCall(use.block, ops.stop_gradient(use.inputs))
            for use in uses
        ]
        summed = self.estimator.conventions.sources == "sum"
        for together in _together(vectors, one_output=summed):
            for call, g in zip(calls, pull(together), strict=True):
                call.add_source(g)
        for use, call in zip(uses, calls, strict=True):
            call.mask = self._mask_of(
                use, call, None if sample_weight is None else of_samples
            )
        return calls, rows, factor

    def _mask_of(self, use: taps.Use, call: Any, of_samples: list[Any] | None) -> Any:
        """Return which rows of a call count, or how much where samples have weights."""
        layer = self.sites[use.block].block.layer
        weighted = of_samples is not None and layer.kind != "scale_shift"
        if use.mask is None and not weighted:
            return None
        g = ops.stack(call.output_grads)
        if getattr(layer, "data_layout", "") == "channels_first":
            g = ops.moveaxis(g, 2, -1)
        reached = ops.any(g != 0, axis=(0, -1))
        # Padding that what is above does not leave out is a row like others.
        mask = None if use.mask is None else use.mask | reached
        if of_samples is None:
            return mask
        weight = losses.layer_weights(of_samples, reached, use.block)
        return weight if mask is None else ops.where(mask, weight, 0.0)

    def _vectors(
        self,
        loss: losses.OutputLoss,
        z: Any,
        weight: Any,
        share: Any,
        step: Any,
        y: Any,
        place: int,
    ) -> Any:
        """Return the vectors of an output, shape (M, N, ..., P), times its weights."""
        mode = self.estimator.mode
        assert mode is not None
        likelihood = loss.row.likelihood
        if mode == "empirical":
            if loss.smoothing:
                raise kc.UnsupportedError(
                    "fisher='empirical' does not know label_smoothing; leave one of them."
                )
            targets = _targets(loss, loss.at(y), z)
            drawn = kc.losses.vectors(likelihood, z, mode=mode, targets=targets)
        else:
            noise = functools.partial(self._noise, z=z, step=step, place=place)
            # Rows that a layer mixes, of one example or of several, must not add up.
            drawn = kc.losses.drawn_vectors(
                likelihood, z, mode=mode, seed=noise, shared=True
            )
        rows_of_vectors, factor = drawn.vectors, share
        if weight is not None:
            factor = factor * weight[..., None]
        return rows_of_vectors * ops.cast(factor, rows_of_vectors.dtype) ** 0.5

    def _noise(self, spec: Any, z: Any, step: Any, place: int) -> Any:
        """Return noise that depends on the step alone, so that a run can be resumed."""
        if not self._jax or isinstance(step, int):
            return kc.losses.draw_noise(spec, like=z, rng=(step << 8) + place)
        import jax

        key = jax.random.fold_in(jax.random.key(place), step)
        return getattr(jax.random, spec.distribution)(key, spec.shape, z.dtype)

    def _batches(self, calls: Any, rows: Any, examples: Any) -> list[dict[str, Any]]:
        # In every mode the vectors are those of a sum, and made here.
        return kc.integration.batches_in_parts(calls, rows=rows, examples=examples)

    # Between a list of gradients and the blocks' parameters.

    def _vector(self, gradients: Sequence[Any]) -> dict[str, dict[str, Any]]:
        place = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        vector: dict[str, dict[str, Any]] = {}
        for name, site in self.sites.items():
            shapes = site.block.layer.parameter_shapes
            parts = {}
            for role, where in site.places.items():
                # A layer may have been frozen since the model was compiled.
                i = place.get(id(where.variable))
                g = None if i is None else gradients[i]
                if g is None:
                    break
                g = g if where.row is None else g[where.row]
                parts[role] = ops.reshape(g, shapes[role])
            else:
                vector[name] = parts
        return vector

    def _replaced(self, gradients: Sequence[Any], directions: Any) -> list[Any]:
        place = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        result = list(gradients)
        for name, parts in directions.items():
            for role, where in self.sites[name].places.items():
                i = place[id(where.variable)]
                old, new = result[i], parts[role]
                if where.row is not None:
                    rows = [*ops.unstack(old, axis=0)]
                    rows[where.row] = ops.reshape(new, rows[where.row].shape)
                    new = ops.stack(rows)
                result[i] = ops.cast(ops.reshape(new, old.shape), old.dtype)
        return result

    # The training step of the model.

    def _attach(self) -> None:
        """Let the model's training step give natural gradients to its optimizer."""
        model = self.model
        if getattr(model, "optimizer", None) is None:
            return
        if "train_step" in vars(model):
            raise kc.UnsupportedError(
                "This model has a KFAC already; remove() it first."
            )
        if not self._jax and model.jit_compile and not model.run_eagerly:
            raise kc.UnsupportedError("Compile the model with jit_compile=False.")
        inner = self._optimizer()
        if inner.gradient_accumulation_steps:
            raise kc.UnsupportedError(
                "gradient_accumulation_steps is not known: Keras accumulates after K-FAC. "
                "Use a larger batch_size."
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        step, attached = model.train_step, model.optimizer
        make = model.make_train_function

        def make_train_function(*args: Any, **options: Any) -> Any:
            # Before Keras reads the variables.
            if self._is_ahead:
                self._push()
            return make(*args, **options)

        def train_step(*inputs: Any) -> Any:
            if model.optimizer is not attached:
                raise kc.UnsupportedError(
                    "The model was compiled again. Call kfac.remove() before, and "
                    "KFAC(model) after model.compile(...)."
                )
            data = keras.utils.unpack_x_y_sample_weight(inputs[-1])
            values = inputs[0][:2] if inputs[1:] else None
            apply = inner.apply

            def natural(gradients: Any, variables: Any = None, **more: Any) -> Any:
                variables = variables or more.get("trainable_variables")
                natural = self._natural([*gradients], variables, data, values)
                return apply(natural, variables)

            with taps.shadowed([(inner, {"apply": natural})]):
                return step(*inputs)

        # Past Keras's `__setattr__`, which would track it.
        hooks = {"train_step": train_step, "make_train_function": make_train_function}
        vars(model).update(hooks)
        # Keras compiled the former step into it.
        model.train_function = None
        if self._jax:
            self._make_variables()

    def _optimizer(self) -> Any:
        """Return the optimizer that is given unscaled gradients, of finite ones."""
        optimizer = self.model.optimizer
        while hasattr(optimizer, "inner_optimizer"):
            optimizer = optimizer.inner_optimizer
        return optimizer

    def _natural(
        self, gradients: Any, variables: Any, data: Any, values: Any
    ) -> list[Any]:
        """Return natural gradients of the variables in a training step of Keras."""
        optimizer = self._optimizer()
        if variables is None:
            variables = private.own_variables(optimizer)
        if len(gradients) != len(variables):
            return [*gradients]  # the optimizer refuses them
        # A custom `train_step` may apply some of the variables, in any order.
        trained = self.model.trainable_variables
        by_variable = {id(v): g for v, g in zip(variables, gradients, strict=True)}
        directions = self._natural_of_all(
            [by_variable.get(id(v)) for v in trained], data, values
        )
        by_variable |= {id(v): g for v, g in zip(trained, directions, strict=True)}
        return [by_variable[id(v)] for v in variables]

    def _natural_of_all(self, gradients: Any, data: Any, values: Any) -> list[Any]:
        """Return natural gradients in the order of ``model.trainable_variables``."""
        optimizer = self._optimizer()
        scale = optimizer.loss_scale_factor
        if scale is not None:
            gradients = [g if g is None else g / scale for g in gradients]
        self.learning_rate = self._rate
        if values is not None:
            self._compiling = True
            try:
                directions = self._compiled_step(gradients, data, values)
            finally:
                self._compiling = False
        else:
            if self.wants_statistics:
                self.observe(*data)
            elif self.reduction == "sum":
                self._rows, self._factor = self._counts(data)
            directions = self.precondition(gradients)
        if scale is not None:
            directions = [g if g is None else g * scale for g in directions]
        return directions

    def _rate(self, step: Any) -> Any:
        """Return the learning rate of the model's optimizer, 1 without one."""
        if getattr(self.model, "optimizer", None) is None:
            return 1.0
        return _positive(self._optimizer().learning_rate)

    def _counts(self, data: Any) -> tuple[int, float]:
        """Return R and the loss's factor of a batch without statistics; note its P."""
        x, *_ = data
        inputs = keras.tree.map_structure(lambda x: tuple(x.shape), x)
        shapes = self.model.compute_output_shape(inputs)
        output_losses = self._losses()
        rows = math.prod(map(int, output_losses[0].at(shapes)[:-1]))
        self.outputs = max(loss.at(shapes)[-1] for loss in output_losses)
        return rows, max(loss.multiple(loss.at(shapes)[-1]) for loss in output_losses)

    # The compiled step of JAX.

    def _make_variables(self) -> None:
        """Put the state into variables of the optimizer, which Keras carries."""
        import jax
        import jax.numpy as jnp

        network = self.estimator.network
        self._form = network.initial(jnp.zeros(()), damping=self.estimator.damping)
        leaves, self._structure = jax.tree.flatten(self._form)
        optimizer = self._optimizer()
        for leaf in (*map(jnp.int32, (self._steps, self._refreshed_at)), *leaves):
            variable = optimizer.add_variable(
                leaf.shape, dtype=str(leaf.dtype), name=f"kfac_{len(self._variables)}"
            )
            # Not bound to a device, as Keras's own variables: else JAX compiles twice.
            variable.assign(ops.convert_to_numpy(leaf))
            self._variables.append(variable)
        self._seen = self._variables[0].value
        # A file of the model holds what it would without K-FAC; see `save`.
        for one in {id(o): o for o in (self.model.optimizer, optimizer)}.values():
            _save_without(one, self._variables)

    def _compiled_step(self, gradients: Any, data: Any, values: Any) -> list[Any]:
        """Take a step inside of the program that Keras compiles."""
        import jax
        import jax.numpy as jnp

        network = self.estimator.network
        counter, last, *leaves = self._variables
        steps, refreshed_at = counter.value, last.value
        state = jax.tree.unflatten(self._structure, [v.value for v in leaves])
        x, y, weight = data

        divisor: Any = 1.0

        def in_form(new: Any) -> Any:
            return jax.tree.map(lambda a, b: a.astype(b.dtype), new, state)

        def updated(state: Any) -> Any:
            nonlocal divisor
            # A number, known when this is traced.
            calls, rows, divisor = self._captured(x, y, weight, values, steps)
            batches = kc.integration.batches_of_calls(calls, rows=rows)
            decay = kc.integration.value_at(
                self.decay_schedule or self.estimator.decay, steps
            )
            return in_form(network.update(state, batches, decay=decay, check="status"))

        def refreshed(state: Any) -> Any:
            damping = kc.integration.value_at(
                self.damping_schedule or self.estimator.damping, steps
            )
            return in_form(network.refresh(state, damping=damping, check="status"))

        def unchanged(state: Any) -> Any:
            return state

        def is_due(interval: kc.integration.Interval) -> Any:
            at_step = steps % kc.integration.value_at(interval, steps) == 0
            # As long as no row has counted, every batch is due.
            return at_step | (refreshed_at < 0)

        due = is_due(self.update_every) & _counts_any(weight)
        state = jax.lax.cond(due, updated, unchanged, state)
        is_known = sum(block.updates for block in state.blocks.values()) > 0
        # Statistics that are not finite leave the last operators in use.
        due = is_due(self.refresh_every) & state.is_good() & is_known
        state = jax.lax.cond(due, refreshed, unchanged, state)
        refreshed_at = jnp.where(due & state.is_good(), steps, refreshed_at)
        vector = self._vector(gradients)
        if self.reduction == "sum":
            divisor *= self._counts(data)[0]
        vector = jax.tree.map(lambda g: g / divisor, vector)
        directions = network.precondition(state, vector)
        if self.kl_clip is not None:
            nu = kc.steps.kl_clip(
                vector,
                directions,
                learning_rate=self._rate(steps),
                bound=kc.integration.bound_at(self.kl_clip, steps, self.outputs),
                lengthen=kc.integration.lengthens(self.kl_clip, self.likelihoods),
                check="status",
            ).scale
            directions = jax.tree.map(lambda g: g * nu, directions)
        assigned = (steps + 1, refreshed_at, *jax.tree.leaves(state))
        for variable, leaf in zip(self._variables, assigned, strict=True):
            variable.assign(leaf)
        return self._replaced(gradients, directions)

    def _pull(self) -> None:
        """Take the state of compiled steps into the estimator.

        While a step is compiled it is not at hand.  A loop that keeps the optimizer's
        variables may put back those of before its steps.
        """
        if not self._variables or self._compiling or self._is_ahead:
            return
        import jax

        # Within `fit` Keras holds the values.
        self.model.jax_state_sync()
        values = [variable.value for variable in self._variables]
        # A step that raised may have donated them.
        if any(x.is_deleted() for x in values) or values[0] is self._seen:
            return
        self._seen = values[0]
        self._steps, self._refreshed_at = map(int, values[:2])
        state = jax.tree.unflatten(self._structure, values[2:])
        # Its operators are of zeros before the first refresh.
        known = self._refreshed_at >= 0
        self._estimator.state = state if known else self._estimator.network.empty()

    def _push(self) -> None:
        """Give the estimator's state to the compiled steps."""
        self._is_ahead = False
        if not self._variables:
            return
        import jax

        state = self._estimator.state
        leaves = jax.tree.leaves(state.in_form_of(self._form))
        numbers = self._steps, self._refreshed_at
        for variable, leaf in zip(self._variables, (*numbers, *leaves), strict=True):
            variable.assign(ops.convert_to_numpy(leaf))
        self._seen = self._variables[0].value


def _counts_any(sample_weight: Any) -> Any:
    """Return whether a row has another weight than zero."""
    weights = keras.tree.flatten(sample_weight)
    return sum(1 if w is None else ops.any(ops.not_equal(w, 0)) for w in weights) > 0


def _together(vectors: list[Any], *, one_output: bool) -> list[list[Any]]:
    """Return what is pulled back at once: a vector of each output, or one output's.

    The exact modes take one output at a time, since products of two must not mix.
    """
    if not one_output:
        return [[v[0] for v in vectors]]
    zeros = [ops.zeros_like(v[0]) for v in vectors]
    return [
        [*zeros[:k], one, *zeros[k + 1 :]]
        for k, v in enumerate(vectors)
        for one in ops.unstack(v, axis=0)
    ]


def _targets(loss: losses.OutputLoss, y: Any, z: Any) -> Any:
    """Return targets as the likelihood reads them."""
    y = ops.convert_to_tensor(y)
    labels = isinstance(loss.row.likelihood, kc.losses.Categorical)
    if labels and len(y.shape) == len(z.shape) and y.shape[-1] == 1:
        y = ops.squeeze(y, -1)
    if labels and len(y.shape) == len(z.shape) - 1:
        return ops.cast(y, "int32")
    y = ops.cast(y, z.dtype)
    return ops.expand_dims(y, -1) if len(y.shape) == len(z.shape) - 1 else y


def _positive(rate: Any) -> Any:
    """Return a learning rate as a number or an array; the KL clip takes no zero."""
    value = ops.convert_to_tensor(rate)
    if keras.backend.backend() == "jax":
        return value
    return max(float(value), 1e-30)


def _save_without(optimizer: Any, variables: list[Any]) -> None:
    """Let an optimizer save and load the variables that it has by itself."""
    hidden = {id(v) for v in variables}

    def visible() -> list[Any]:
        return [v for v in optimizer.variables if id(v) not in hidden]

    def save(store: Any) -> None:
        for i, variable in enumerate(visible()):
            store[str(i)] = variable.numpy()

    def load(store: Any) -> None:
        for i, variable in enumerate(visible()):
            variable.assign(store[str(i)])

    vars(optimizer).update(save_own_variables=save, load_own_variables=load)
