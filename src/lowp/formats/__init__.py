"""What a number is: formats as data, their names, and the exact reference. Pure Python; imports no torch."""

from lowp.formats.base import Format as Format
from lowp.formats.base import Rounding as Rounding
from lowp.formats.block import BlockFormat as BlockFormat
from lowp.formats.codebook import CodebookFormat as CodebookFormat
from lowp.formats.fixed import FixedFormat as FixedFormat
from lowp.formats.floats import FloatFormat as FloatFormat
from lowp.formats.floats import Specials as Specials
from lowp.formats.parse import FormatLike as FormatLike
from lowp.formats.parse import format as format
from lowp.formats.parse import is_format as is_format
from lowp.formats.parse import usual_name as usual_name
from lowp.formats.posit import PositFormat as PositFormat
from lowp.formats.registry import FORMATS as FORMATS
from lowp.formats.registry import AnyFormat as AnyFormat
