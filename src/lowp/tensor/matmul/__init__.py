"""Products of matrices as narrow hardware computes them: every product and every partial sum rounded to a format."""

from lowp.tensor.matmul.arithmetic import Arithmetic as Arithmetic
from lowp.tensor.matmul.convolution import conv2d as conv2d
from lowp.tensor.matmul.product import linear as linear
from lowp.tensor.matmul.product import matmul as matmul
