"""Numbers that others have published, as they are in their papers.

GPipe: Huang et al., 2019, "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism", tables 1, 2 and 3.
Zero bubble: Qi et al., 2024, "Zero Bubble Pipeline Parallelism", the table of bubble rates and that of profiled times.
"""

from typing import NamedTuple


class PublishedSize(NamedTuple):
    """A column of GPipe's table 1: the largest model of a way to train, on devices of so many bytes.

    size      (L, D) of an AmoebaNet-D, or L of a Transformer
    devices   None: no pipeline and no recompute
    """

    size: tuple[int, ...]
    devices: int | None
    parameters: float


AMOEBANET = (
    PublishedSize((18, 208), None, 82e6),
    PublishedSize((18, 416), 1, 318e6),
    PublishedSize((18, 544), 2, 542e6),
    PublishedSize((36, 544), 4, 1.05e9),
    PublishedSize((72, 512), 8, 1.8e9),
)
TRANSFORMER = (PublishedSize((3,), None, 282.2e6), PublishedSize((13,), 1, 785.8e6), PublishedSize((103,), 8, 5.3e9))
AMOEBANET_DEVICE, TRANSFORMER_DEVICE = 8 * 2**30, 16 * 2**30
AMOEBANET_BATCH, TRANSFORMER_BATCH = 128, 32  # samples in a minibatch

# Table 2: throughput for K of 2, 4, 8 and M of 1, 4, 32, that of K = 2 and M = 1 being 1.
_GRID = [(K, M) for K in (2, 4, 8) for M in (1, 4, 32)]
THROUGHPUT = {
    "AmoebaNet-D": dict(zip(_GRID, (1.0, 1.07, 1.21, 1.13, 1.26, 1.84, 1.38, 1.72, 3.48), strict=True)),
    "Transformer": dict(zip(_GRID, (1.0, 1.7, 1.8, 1.07, 3.2, 3.4, 1.3, 4.8, 6.3), strict=True)),
}
# Table 3: the same without fast links, M = 32, that of K = 2 being 1.
SLOW_LINKS = {"AmoebaNet-D": {2: 1.0, 4: 1.7, 8: 2.7}, "Transformer": {2: 1.0, 4: 1.8, 8: 3.3}}


class PublishedRates(NamedTuple):
    """A line of zero bubble's tables: what was profiled, in milliseconds, and the bubble rates for it. Sequences have
    1,024 tokens.
    """

    model: str
    devices: int
    microbatches: int
    forward: float
    input_grad: float
    weight_grad: float
    hop: float
    f1b1: float
    h1: float
    h2: float
    zb_1p: float
    zb_2p: float

    @property
    def kept_for_weight_grad(self) -> float:
        """Of what a forward leaves behind, by the paper's formulas: 34 h + 5 a s bytes, and 32 h until W."""
        width, heads = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}[self.model]
        return 32 * width / (34 * width + 5 * heads * 1024)


RATES = (
    PublishedRates("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    PublishedRates("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    PublishedRates("1.5B", 8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    PublishedRates("6.2B", 8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    PublishedRates("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    PublishedRates("6.2B", 8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    PublishedRates("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    PublishedRates("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    PublishedRates("14.6B", 16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    PublishedRates("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    PublishedRates("28.3B", 32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    PublishedRates("28.3B", 32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
)
