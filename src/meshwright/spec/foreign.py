"""Models whose files our families do not describe alone: architectures that only transformers implements, text models
inside multimodal ones, and matrices stored in fp8.
"""

from typing import Literal

from meshwright.spec.base import Spec

SplitDim = Literal["heads", "kv_heads", "ffn"]
"""Name of a dim that ranks split."""


class SplitParameter(Spec):
    """A parameter that tensor-parallel ranks split, or of which each needs only some rows."""

    name: str
    """Name within its `SplitModule`."""
    kind: SplitDim
    """Name of the dim that is split."""
    dim: int
    """Its index."""
    segments: tuple[int, ...] = ()
    """Sizes of the runs along the dim that ranks split one by one, as queries, keys and values in one matrix; empty if
    each rank has a single run."""
    kept: tuple[tuple[int, int], ...] = ()
    """If the parameter stays whole: each rank's rows, (start, stop), as with fewer key and value heads than ranks."""


class SplitModule(Spec):
    """A module of some blocks, as tensor-parallel ranks compute it: each a part, whose outputs are summed."""

    name: str
    """Name within the block."""
    layers: tuple[int, ...]
    """The blocks."""
    parameters: tuple[SplitParameter, ...]
    """All others stay whole."""
    partial: tuple[str, ...] = ()
    """Whole parameters whose gradients on the ranks add up to the whole gradient; on the others each is whole."""
    once: tuple[str, ...] = ()
    """Whole parameters that only the first rank adds to the sum, such as the bias of its last matrix."""
    entered: tuple[tuple[str, int | str], ...] = ()
    """(module within, argument by position or name): inputs whose gradients are summed over ranks."""
    summed: str = ""
    """The module within whose output is summed; empty: this one."""
    gathered: tuple[str, ...] = ()
    """Norms within that span the ranks' parts."""
    attributes: tuple[tuple[str, str, int, int], ...] = ()
    """(module within, attribute, multiplier, divisor): numbers that are smaller on a rank. `config.x` is of a copy."""


class ForeignSplit(Spec):
    """A derived split of a model of transformers over tensor-parallel ranks (`derive/`)."""

    tp: int
    """Number of ranks."""
    modules: tuple[SplitModule, ...] = ()
    """The modules that are split; every rank computes the others whole."""
    whole: tuple[tuple[str, str], ...] = ()
    """Matrices of blocks that stay whole, by their names with * for the block, and the reason."""
    notes: tuple[str, ...] = ()
    """Disagreements with transformers' own plan."""
    problem: str = ""
    """The reason why none could be derived, in a plan; empty otherwise."""
    masked: bool = True
    """Whether it also holds where attention gets a mask: in rows of several documents, and in parts of rows."""
    rounds: bool = False
    """Whether transformers computes something in float32 in a float64 model, even where it gets float64 for float32
    (`models/widen.py`)."""

    def within(self, blocks: str, path: str) -> bool:
        """Whether a module lies inside one that is split; `blocks` is the name of the list of blocks."""
        layer, _, inner = path.removeprefix(f"{blocks}.").partition(".")
        return path.startswith(f"{blocks}.") and any(
            int(layer) in module.layers and inner.startswith(f"{module.name}." if module.name else "")
            for module in self.modules
        )


class ForeignCuts(Spec):
    """How pipeline stages cut a model of transformers between blocks, and which parameters outside them each has."""

    hidden: int | str = 0
    """The argument of a block that is sent, by position or name; every stage computes the others itself."""
    outputs: int = 0
    """If a block returns a tuple that begins with the hidden states: its length."""
    before: tuple[str, ...] = ()
    """The modules outside the blocks that the first stage has."""
    after: tuple[str, ...] = ()
    """The modules outside the blocks that the last stage has."""
    copied: tuple[str, ...] = ()
    """Parameters that the first and the last stage both have, as tied embeddings."""
    problem: str = ""
    """The reason why the model cannot be cut; empty if it can."""

    def is_before(self, name: str) -> bool:
        """Whether a module or parameter lies before the blocks."""
        return any(f"{name}.".startswith(f"{path}.") for path in self.before)

    def is_after(self, name: str) -> bool:
        """Whether a module or parameter lies after the blocks."""
        return any(f"{name}.".startswith(f"{path}.") for path in self.after)


class ForeignContext(Spec):
    """Whether context-parallel ranks can share the rows of a model of transformers (`derive/context.py`)."""

    documents: bool = True
    """Whether the documents of a row stay separate."""
    problem: str = ""
    """The reason why they cannot; empty if they can."""


class ExpertModule(Spec):
    """The experts of some blocks: ranks hold equal shares of them, and get the rows of their tokens."""

    name: str
    """Name within the block."""
    layers: tuple[int, ...]
    """The blocks."""
    count: int
    """The number of experts of a block."""
    parameters: tuple[str, ...]
    """Names within the module, all with a matrix of every expert."""
    arguments: tuple[int | str, int | str, int | str]
    """The arguments of its forward pass, by position or name: tokens, their experts, and the weights of these."""
    attributes: tuple[str, ...] = ()
    """Numbers of experts, which are smaller on a rank."""


class ForeignExperts(Spec):
    """How expert-parallel ranks share the experts of a model of transformers (`derive/experts.py`)."""

    modules: tuple[ExpertModule, ...] = ()
    """The experts."""
    problem: str = ""
    """The reason why ranks cannot share them; empty if they can."""


class ForeignModel(Spec):
    """An architecture that only transformers implements."""

    config: str
    """The content of the model's config.json."""
    blocks: str
    """Name of the list of blocks, as in `gpt_neox.layers`."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every parameter in transformers' module; except for `stacks`, the files store the same."""
    stacks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Parameters `X.experts.NAME` that stack the tensors `X.experts.N.PART.weight` of all experts, and their PARTs,
    whose rows follow one another in each expert's matrix."""
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Untrained tensors of the model, such as the biases of routers: name and shape."""
    scalars: tuple[tuple[str, float], ...] = ()
    """Stored scalar tensors, and their values."""
    transposed: tuple[str, ...] = ()
    """Stacks of experts whose matrices the files store (in, out)."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names in transformers' module, and their different spelling in the files."""
    dims: tuple[tuple[str, str], ...] = ()
    """The recipe's dims of parameters, by patterns of names, which overrule derived ones."""
    split: ForeignSplit | None = None
    """How tensor-parallel ranks split it, if the layout has any."""
    cuts: ForeignCuts | None = None
    """Where pipeline stages cut it, if the layout has any."""
    context: ForeignContext | None = None
    """Whether ranks can share its rows, if the layout has context-parallel ones."""
    experts: ForeignExperts | None = None
    """How ranks share its experts, if the layout has expert-parallel ones."""
    others: tuple[ForeignSplit, ...] = ()
    """In a plan, the splits over other numbers of ranks."""

    def split_over(self, ranks: int) -> ForeignSplit | None:
        """The split over this many ranks, if it has been derived."""
        known = (self.split, *self.others)
        return next((split for split in known if split is not None and split.tp == ranks), None)


class Wrapper(Spec):
    """What surrounds the text model of a multimodal one. Training neither loads nor changes it."""

    config: str
    """The content of the whole model's config.json."""
    modules: tuple[tuple[str, str], ...]
    """Prefixes of the text model's tensors, and their spellings in transformers' class of the whole model."""
    files: tuple[tuple[str, str], ...]
    """The same prefixes, and their spellings in the files. Tensors with other prefixes are not of the text model."""


class Fp8Files(Spec):
    """Matrices stored in fp8 with scales, which are multiplied out when read."""

    scale: str
    """Suffix of the name of a matrix's scales, after the matrix's own name."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if not a whole row or matrix does."""
