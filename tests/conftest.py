from __future__ import annotations

import torch

# The matrices of these tests are small: a second thread costs more than it brings.
torch.set_num_threads(1)
