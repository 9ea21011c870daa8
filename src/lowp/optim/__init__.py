"""Updates in 16 bits and fewer: SGD, LARS, AdamW and LAMB, their states, loss scale and schedules."""

from lowp.optim import schedules as schedules
from lowp.optim.adamw import AdamW as AdamW
from lowp.optim.lamb import LAMB as LAMB
from lowp.optim.lars import LARS as LARS
from lowp.optim.sgd import SGD as SGD
