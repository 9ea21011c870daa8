"""What a format's name may ask for: whatever it says, the answer is a format or one clear line, at once."""

import math
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowp.formats import BlockFormat, CodebookFormat, FloatFormat, Format, Specials, format

HUGE = ("99999999999", "9" * 40, "1" + "0" * 30, "65537")
IMPOSSIBLE = [
    *(f"posit8_{n}" for n in HUGE),
    *(f"posit{n}" for n in HUGE),
    *(f"e{n}m3" for n in HUGE),
    *(f"e4m{n}" for n in HUGE),
    *(f"e4m3b{n}" for n in HUGE),
    *(f"e4m3b-{n}" for n in HUGE),
    *(f"int{n}" for n in HUGE),
    *(f"fixed{n}.{m}" for n in HUGE for m in ("0", "3", "9" * 20)),
    *(f"binary{n}p3se" for n in HUGE),
    *(f"binary8p{n}se" for n in HUGE),
    *(f"block(e4m3fn, {n}, e8m0fnu)" for n in HUGE),
    *("posit8_10", "posit16_7", "binary8p8se", "binary8p0sf", "int1", "int25", "fixed0.0", "block(e4m3fn, 0, e8m0fnu)"),
    *("block(mxfp4, 32, e8m0fnu)", "block(block(e4m3fn, 32, e8m0fnu), 32, e8m0fnu)", "block(" * 50, "block(int8, 16, int8)"),
    *("block(int8, 16, fp32, fp32)", "block(posit16_6, 16, e8m0fnu)", "block(e2m1fn, 16, e4m3fn, rceil)", "mxfp4_rceil_rceil"),
    *("e4m3" * 1000, "x" * 10**6, "", " ", "\0", "int\N{ARABIC-INDIC DIGIT EIGHT}", "nvfp4_rceil"),
]


@pytest.mark.parametrize("text", IMPOSSIBLE, ids=lambda text: text[:30])
def test_too_much(text):
    """posit8_99999999999 took 36 seconds."""
    start = time.process_time()
    with pytest.raises(ValueError, match=r"[a-z]") as error:
        format(text)
    assert time.process_time() - start < 0.1
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400


digits = st.integers(0, 10**12).map(str) | st.integers(0, 30).map(str)
words = (
    "e m b b- fn fnuz inuz nan finite _u _ns _nz int fixed . posit _ binary p se uf block( , ) fp32 rceil e8m0fnu e4m3fn mxfp4"
)
pieces = st.sampled_from([*words.split(), " ", "-", "\n", "é"])
texts = st.lists(pieces | digits, max_size=12).map("".join) | st.text(max_size=120)


@given(texts)
@example("posit8_99999999999")
@settings(max_examples=400, deadline=None)
def test_any_text(text):
    start = time.process_time()
    try:
        found = format(text)
    except ValueError:
        pass
    else:
        assert isinstance(found, (Format, BlockFormat))
        assert format(str(found)) == found
        assert found.max > 0
    assert time.process_time() - start < 0.5


@given(
    st.builds("e{}m{}".format, st.integers(0, 9), st.integers(0, 24)),
    st.sampled_from(["", "b3", "b-9", "b255"]),
    st.sampled_from(["", "fn", "fnuz", "inuz", "finite"]),
    st.sampled_from(["", "_u", "_ns", "_u_ns", "_ns_nz", "_u_ns_nz", "_nz"]),
)
@settings(max_examples=300, deadline=None)
def test_any_float_prints_what_it_parses(body, bias, specials, flags):
    try:
        found = format(body + bias + specials + flags)
    except ValueError:
        return
    assert format(str(found)) == found


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e39, 0.1])
def test_codebooks_hold_finite_float32_numbers(value):
    """An infinity or NaN in a codebook was ignored: never produced, and still decoded."""
    with pytest.raises(ValueError, match=rf"codebook 'own' holds {re.escape(repr(value))}; entries are finite float32 numbers"):
        CodebookFormat("own", (-1.0, 0.0, 1.0, value))


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_codebooks_fill_their_codes(count):
    with pytest.raises(ValueError, match=f"codebook 'own' has {count} entries"):
        CodebookFormat("own", tuple(float(i) for i in range(count)))


@pytest.mark.parametrize(
    ("text", "largest", "smallest", "infinity", "nan"),
    [
        ("binary8p3se", 49152.0, 2.0**-17, 0x7F, 0x80),
        ("binary8p4se", 224.0, 2.0**-10, 0x7F, 0x80),
        ("binary8p3sf", 57344.0, 2.0**-17, None, 0x80),
        ("binary8p3ue", 5 * 2.0**29, 2.0**-33, 0xFE, 0xFF),
        ("binary8p3uf", 6 * 2.0**29, 2.0**-33, None, 0xFF),
    ],
)
def test_p3109(text, largest, smallest, infinity, nan):
    fmt = format(text)
    assert isinstance(fmt, FloatFormat)
    assert (fmt.max, fmt.smallest, fmt.inf_code, fmt.nan_code) == (largest, smallest, infinity, nan)
    assert (fmt.specials is Specials.EXTENDED) == (infinity is not None)
    assert not fmt.has_negative_zero
    assert format(f"p3109_k{text.removeprefix('binary')}") == fmt
    if infinity is not None:
        assert str(fmt) == text


def test_a_codebook_whose_only_zero_is_negative_is_refused():
    """0 has no code there, and -0.0 is not what it becomes."""
    with pytest.raises(ValueError, match=r"codebook 'own' holds -0\.0 and not 0\.0"):
        CodebookFormat("own", (-1.0, -0.0, 1.0, 2.0))
    assert CodebookFormat("own", (-1.0, -0.0, 0.0, 2.0)).has_negative_zero
    assert not CodebookFormat("own", (-1.0, 0.0, 1.0, 2.0)).has_negative_zero
