"""An optimizer for delayed gradients: Nesterov's look-ahead, with a long memory, stands in for the updates to come.

Ajanthan, Ramasinghe, Zuo, Avraham and Long, "Nesterov Method for Asynchronous Pipeline Parallel Optimization"
(ICML 2025, arXiv 2505.01099), equation 10, with t the update, s the delay, g the gradient and c the momentum:

    d_t     = c (w_t - w_{t-1})
    w_{t+1} = w_t + d_t - lr (1 - c) g(w_{t-s} + d_{t-s})

Nesterov's own method (their equation 8) has no factor (1 - c). With it, and c near 1, the look-ahead d of s updates ago
points where the weights have gone since, so the old gradient was taken near to where it is applied.

A model holds the points where gradients are taken, p = w + d. Written for these, with d_t = -lr c m_{t-1}, the same is

    m_t     = c m_{t-1} + (1 - c) g_t
    p_{t+1} = p_t - lr (c m_t + (1 - c) g_t)

which is the numerator of NAdam. The authors therefore train with torch's NAdam, which also divides by sqrt(v) + eps and
corrects the bias of m and v, at c = 0.99 and with the weight decay decoupled; so do we.
"""

from typing import Any

from torch.optim import NAdam
from torch.optim.optimizer import ParamsT


class DelayedNesterov(NAdam):
    """torch's NAdam as the authors of arXiv 2505.01099 set it up, for gradients at a fixed delay.

    betas[0] is c of the equations once warmed up: torch uses betas[0] * (1 - 0.96^(t * momentum_decay) / 2), which
    starts at half of it. Every stage has the same c, whatever its delay, as in the authors' script.
    """

    def __init__(
        self, params: ParamsT, lr: float = 3e-4, betas: tuple[float, float] = (0.99, 0.999), **options: Any
    ) -> None:
        super().__init__(params, lr, betas, **{"weight_decay": 0.01, "decoupled_weight_decay": True, **options})
