"""Block formats as C++: rows of numbers that are cut into blocks with a scale each, in one pass over memory.

The arithmetic is traced (block_stages.py) and printed in vector types; the loops around it are written here. As many blocks as
a vector has numbers are worked on together:

1. the largest magnitude of each block;
2. scales and units of all of them, one number of a vector for each block;
3. the elements of one block after the other, whose second reading finds them in the cache.

Stochastic rounding is sure of most elements; those that it is in doubt about are settled one by one, in integers.
Codes of less than 8 bits may be packed on the way (`lowp.pack`'s order), eight at a time: one instruction gathers the low bits
of eight bytes. Formats with a scale for the whole tensor look at all numbers first.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from lowp.tensor.block_stages import BlockOperation
from lowp.tensor.carrier import CARRIERS
from lowp.tensor.lists import cpp, drawing
from lowp.tensor.lists.bit_stream import EIGHT_CODES
from lowp.tensor.lists.preamble import SINGLES, preamble
from lowp.tensor.lists.tracing import Program, Value, in_words
from lowp.tensor.lists.vectors import SCALARS, TYPES, Printer, SinglePrinter
from lowp.tensor.noise import KEY_SIZE
from lowp.tensor.packing import group

_CHUNK = 1 << 12  # elements, about
_WORTH_THREADS = 1 << 15  # elements
_AHEAD = 4096  # bytes: a page

_HELPERS = r"""
template <class V> INLINE V spread(const V& of_blocks, long b) { return splat<V>(of_blocks[b]); }  // the number of block b
template <class V> INLINE i32 largest_of_each(const V* tops) {  // of numbers that are not negative
    i32 most; for (int b = 0; b < LANES; b++) most[b] = largest_of(tops[b]); return most; }
#if defined(AVX512_32)
// Left to itself, GCC 12 takes the number through a general register: one more instruction, for a unit that has much to do.
INLINE i32 spread(const i32& of_blocks, long b) {
    i32 r; asm("vpbroadcastd %1, %0" : "=v"(r) : "m"(((const int32_t*)&of_blocks)[b])); return r; }
INLINE f32 spread(const f32& of_blocks, long b) {
    f32 r; asm("vbroadcastss %1, %0" : "=v"(r) : "m"(((const float*)&of_blocks)[b])); return r; }
// Each step makes one vector of two, which holds half as many numbers of each block: 45 instructions instead of 160.
#define HALVES(f, g, a, b) larger((i32)f((__m512i)a, (__m512i)b), (i32)g((__m512i)a, (__m512i)b))
INLINE __m512i even_quarters(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
INLINE __m512i odd_quarters(__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xDD); }
INLINE i32 largest_of_each(const i32* tops) {
    i32 t[8];
    for (int i = 0; i < 8; i++) t[i] = HALVES(_mm512_unpacklo_epi32, _mm512_unpackhi_epi32, tops[2 * i], tops[2 * i + 1]);
    for (int i = 0; i < 4; i++) t[i] = HALVES(_mm512_unpacklo_epi64, _mm512_unpackhi_epi64, t[2 * i], t[2 * i + 1]);
    for (int i = 0; i < 2; i++) t[i] = HALVES(even_quarters, odd_quarters, t[2 * i], t[2 * i + 1]);
    return HALVES(even_quarters, odd_quarters, t[0], t[1]);
}
#endif
#if LANES >= 8
typedef uint64_t words __attribute__((vector_size(LANES)));
INLINE void store_packed(uint8_t* p, i8 codes, long count) {
    uint8_t part[LANES]; uint8_t* to = count == LANES ? p : part;
    for (int i = 0; i < LANES / 8; i++) store_bits(to + BITS * i, low_bits(((words)codes)[i]));
    if (count < LANES) memcpy(p, part, (count * BITS + 7) / 8);
}
INLINE i8 load_packed(const uint8_t* p, long count) {
    uint8_t part[LANES] = {};
    if (count < LANES) memcpy(part, p, (count * BITS + 7) / 8);
    words r; for (int i = 0; i < LANES / 8; i++) r[i] = in_bytes(load_bits((count == LANES ? p : part) + BITS * i));
    return (i8)r;
}
#else  // their bits fill whole bytes, fewer than eight
INLINE void store_packed(uint8_t* p, i8 codes, long count) {
    uint64_t bytes = 0; memcpy(&bytes, &codes, LANES);
    bytes = low_bits(bytes);
    if (count == LANES) memcpy(p, &bytes, LANES * BITS / 8); else memcpy(p, &bytes, (count * BITS + 7) / 8);
}
INLINE i8 load_packed(const uint8_t* p, long count) {
    uint64_t bits = 0;
    if (count == LANES) memcpy(&bits, p, LANES * BITS / 8); else memcpy(&bits, p, (count * BITS + 7) / 8);
    bits = in_bytes(bits);
    i8 r; memcpy(&r, &bits, LANES); return r;
}
#endif
"""


def build(operation: BlockOperation) -> tuple[Callable[..., int], Callable[..., int] | None]:
    """Compile an operation for a CPU: see `_BlockSource.text` for the arguments of the result. The second, where rounding is
    stochastic, takes the five numbers that a key is made of in the place of its address."""
    text, address, number = _BlockSource(operation).text(), ctypes.c_void_p, ctypes.c_long
    run = cpp.build_parallel(text, [address] * 5 + [number] * 4)
    run_drawn = cpp.build_parallel(text, [address] * 4 + [number] * 9, "run_drawn") if operation.stochastic else None
    for function in (run, run_drawn):
        if function is not None:
            function.restype = ctypes.c_int
    return run, run_drawn


class _BlockSource:
    """The text, piece by piece."""

    def __init__(self, operation: BlockOperation) -> None:
        self.operation = operation
        self.printer = Printer()
        self.stages = operation.stages(torch.device("cpu"), on_gpu=False)
        if operation.stochastic:
            self.stages["element_of"] = in_words(self.stages["element_of"], range(KEY_SIZE - 1))
        # What is done once a block may be in vectors that pass through memory.
        element = self.stages["value_of" if operation.kind == "decode" else "element_of"]
        wide = any(v.dtype.itemsize == 8 for v in (*element.elements, *(s.result for s in element.statements)))
        self.preamble = preamble(wide, group(operation.program.fmt.element.bits)[0] if operation.packed else 1)

    def text(self) -> str:
        """`run(numbers, elements, scales, whole, key, rows, length, apart, threads)`: addresses of x or of the result, of the
        elements' and the scales' codes, of the tensor's own scale and of the noise's key; how many rows there are and how long
        they are; how far neighbours in a row are apart in the order in which noise counts elements. 0: nothing was done, the
        tensor's scale is below `operation.lowest_whole` or not finite."""
        fmt, number = self.operation.program.fmt, SCALARS[self.operation.storage]
        element, scale = SCALARS[self.operation.element_storage], SCALARS[self.operation.scale_storage]
        stages = {name: self._stage(name, stage) for name, stage in self.stages.items() if name != "settled"}
        # a register each, where they would be loaded again for every vector
        constants = [f"const auto constant{place} = ::constant{place};" for place in self.printer.constants.values()]
        keys = self.stages["element_of"].numbers if self.operation.stochastic else {}
        constants += [f"const {TYPES[v.dtype]} {v.name} = splat<{TYPES[v.dtype]}>(key[{place}]);" for place, v in keys.items()]
        body = self._decode() if self.operation.kind == "decode" else self._encode()
        whole = self._tensor_scale(stages.pop("tensor_scale_of", []))
        lines = [
            f"#define BITS {min(fmt.element.bits, 8)}",
            EIGHT_CODES,
            _HELPERS,
            *self._settled(),
            f'extern "C" int run({number}* numbers, {element}* elements, {scale}* scales, float* whole, const int32_t* key,',
            "                    long rows, long length, long apart, long threads) {",
            f"    const long width = {fmt.size}, in_row = (length + width - 1) / width, blocks = rows * in_row;",
            f"    const long bytes_in_row = (length * {fmt.element.bits} + 7) / 8, even = length % width == 0;",
            f"    const bool parallel = threads > 1 && rows * length >= {_WORTH_THREADS};",
            f"    constexpr long vectors = {_CHUNK} / (LANES * {fmt.size}), together = (vectors > 1 ? vectors : 1) * LANES;",
            *(f"    {line}" for line in whole),
            "    #pragma omp parallel for num_threads(threads) if(parallel)",
            "    for (long chunk = 0; chunk < blocks; chunk += together) {",
            "        const Subnormals subnormals;",
            *(f"        {line}" for line in (*constants, *(line for lines in stages.values() for line in lines))),
            "        const long end = chunk + together < blocks ? chunk + together : blocks;",
            "        for (long first = chunk; first < end; first += LANES) {",
            "            const long count = end - first < LANES ? end - first : LANES;",
            "            const auto begin = [&](long b) __attribute__((always_inline)) {  // of a block's numbers",
            "                return even ? b * width : b / in_row * length + b % in_row * width; };",
            "            const auto packed_begin = [&](long b) __attribute__((always_inline)) {",
            f"                return b / in_row * bytes_in_row + b % in_row * (width * {fmt.element.bits} / 8); }};",
            "            const auto size = [&](long b) __attribute__((always_inline)) {",
            "                return even || length - b % in_row * width > width ? width : length - b % in_row * width; };",
            *(f"            {line}" for line in body),
            "        }",
            "    }",
            "    return 1;",
            "}",
        ]
        if self.operation.stochastic:
            lines += [
                drawing.key_text(),
                f'extern "C" int run_drawn({number}* numbers, {element}* elements, {scale}* scales, float* whole, long begun, '
                "long seed, long step, long stream, long offset, long rows, long length, long apart, long threads) {",
                f"    int32_t key[{KEY_SIZE}];",
                "    single::make_key(begun, seed, step, stream, offset, key);",
                "    return run(numbers, elements, scales, whole, key, rows, length, apart, threads);",
                "}",
            ]
        return "\n".join([self.preamble, *self.printer.declarations(), *lines])

    def _stage(self, name: str, program: Program) -> list[str]:
        """A traced function as one of C++ that writes its results to its last arguments."""
        self.printer.begin()
        taken = [f"const {TYPES[v.dtype]} {v.name}" for v in program.elements]
        taken += ["const i32 index"] if program.numbers else []
        given = [f"{TYPES[v.dtype]}& result{i}" for i, v in enumerate(program.results)]
        return [
            f"const auto {name} = [&]({', '.join((*taken, *given))}) __attribute__((always_inline)) {{",
            *("    " + line for line in cpp.lines_of(self.printer, [*program.statements], {v.name for v in program.results})),
            *(f"    result{i} = {v.name};" for i, v in enumerate(program.results)),
            "};",
        ]

    def _settled(self) -> list[str]:
        """The stage of that name, as a function of single numbers that writes its result to its last argument."""
        if not self.operation.stochastic:
            return []
        program, printer = self.stages["settled"], SinglePrinter()
        taken = ", ".join(f"const {TYPES[v.dtype]} {v.name}" for v in program.elements)
        return [
            SINGLES[0],
            f"static __attribute__((noinline)) {TYPES[program.results[0].dtype]} settled({taken}, const i32 index, "
            "const int32_t* key) {",
            *(f"    const {TYPES[v.dtype]} {v.name} = key[{place}];" for place, v in program.numbers.items()),
            *(f"    const {TYPES[s.result.dtype]} {s.result.name} = {printer.expression(s)};" for s in program.statements),
            f"    return {program.results[0].name};",
            "}",
            SINGLES[1],
        ]

    def _element(self, load: str, kind: str, name: str) -> str:
        """A vector of elements, as `name`."""
        taken = self._carried()[3]
        if not self.operation.stochastic:
            return f"{kind} {name}; element_of({load}{taken}, {name});"
        whole = ", tensor_scale[0]" if self._whole else ""
        return (
            "const i32 index = splat<i32>((int32_t)at) + (splat<i32>((int32_t)e) + LANE_NUMBERS) * splat<i32>((int32_t)apart);"
            f" const auto x = {load}; {kind} {name}; i32 unsure; element_of(x{taken}, index, {name}, unsure); "
            "if (__builtin_expect(any_above(i32{}, unsure), 0)) "
            f"for (long l = 0; l < n; l++) if (unsure[l]) {name}[l] = single::settled(x[l], of_code[b]{whole}, index[l], key);"
        )

    def _carried(self) -> tuple[list[str], str, list[str], str]:
        """What elements get from their block: `_carried`, and what is kept for those that are in doubt."""
        first = 3 if self.operation.stochastic else 2
        declared, passed, kept, taken = _carried(self.stages["block_scale_of"].results[first:])
        if not self.operation.stochastic:
            return declared, passed, kept, taken
        at = "const long row = (first + b) / in_row, column = (first + b) % in_row * width;"
        kept += [f"    {at}", "    const long at = row / apart * length * apart + row % apart + column * apart;"]
        return ["i32 of_code;", *declared], f", of_code{passed}", kept, taken

    def _tensor_scale(self, stage: list[str]) -> list[str]:
        """The tensor's own scale, found from all numbers (or given), as a vector."""
        if not self.operation.program.fmt.tensor_scale:
            return []
        if self.operation.kind == "decode":
            return [*self._refuse("*whole"), "const f32 tensor_scale = splat<f32>(*whole);"]
        own, kind = CARRIERS[self.operation.dtype], TYPES[self.operation.storage]
        return [
            "int32_t most = 0;",
            "const long all = rows * length, pieces = (all + 4095) / 4096;",
            "#pragma omp parallel for num_threads(threads) if(parallel) reduction(max : most)",
            "for (long piece = 0; piece < pieces; piece++) {",
            "    const long end = piece * 4096 + 4096 < all ? piece * 4096 + 4096 : all;",
            f"    {kind} top = {{}};",
            "    const auto look = [&](long e, long count) __attribute__((always_inline)) {",
            f"        const {kind} size = load<{kind}>(numbers + e, count) & {own.magnitude};",
            f"        top = larger(top, size < {own.infinity} ? size : {kind}{{}});",
            f"        __builtin_prefetch((const char*)(numbers + e) + {_AHEAD});",
            "    };",
            "    long e = piece * 4096;",
            "    for (; e + LANES <= end; e += LANES) look(e, LANES);",
            "    if (e < end) look(e, end - e);",
            "    const int32_t found = largest_of(converted<i32>(top));",
            "    most = found > most ? found : most;",
            "}",
            "f32 tensor_scale;",
            "{",
            "    const Subnormals subnormals;",
            *(f"    {line}" for line in stage),
            "    tensor_scale_of(splat<i32>(most), tensor_scale);",
            "}",
            *self._refuse("tensor_scale[0]"),
            "if (whole) *whole = tensor_scale[0];",
        ]

    def _refuse(self, whole: str) -> list[str]:
        lowest = self.operation.lowest_whole
        return [] if lowest is None else [f"if (!({whole} >= (float){lowest.hex()} && {whole} < INFINITY)) return 0;"]

    @property
    def _whole(self) -> str:
        return ", tensor_scale" if self.operation.program.fmt.tensor_scale else ""

    @property
    def _place(self) -> str:
        """Where the codes of block `first + b` begin."""
        packed = "(uint8_t*)elements + packed_begin(first + b)"
        return packed if self.operation.packed else "elements + begin(first + b)"

    @property
    def _byte(self) -> str:
        """Of packed element `e`."""
        return f"e * {self.operation.program.fmt.element.bits} / 8"

    @property
    def _stored(self) -> str:
        packed = f"store_packed(target + {self._byte}, code, n);"
        return packed if self.operation.packed else "store(target + e, code, n);"

    def _encode(self) -> list[str]:
        """quantize and encode: the largest numbers of blocks, their scales, their elements."""
        operation = self.operation
        own, kind = CARRIERS[operation.dtype], TYPES[operation.storage]
        declared, passed, kept, _ = self._carried()
        lines = [
            "i32 tops[LANES];",
            "for (long b = 0; b < count; b++) {",
            "    const auto numbers_of = numbers + begin(first + b);",
            "    const long stop = size(first + b);",
            f"    {kind} top = {{}};",
            *_over_block(f"top = larger(top, load<{kind}>(numbers_of + e, n) & {own.magnitude});"),
            "    tops[b] = converted<i32>(top);",
            "}",
            "for (long b = count; b < LANES; b++) tops[b] = i32{};",
            "const i32 most = largest_of_each(tops);",
            "i32 finite = most;",
            f"if (__builtin_expect(any_above(most, splat<i32>({own.infinity - 1})), 0)) for (long b = 0; b < count; b++) {{",
            "    // again, without what is not finite",
            "    const auto numbers_of = numbers + begin(first + b);",
            "    const long stop = size(first + b);",
            f"    {kind} top = {{}};",
            *_over_block(
                f"const {kind} size = load<{kind}>(numbers_of + e, n) & {own.magnitude}; "
                f"top = larger(top, size < {own.infinity} ? size : {kind}{{}});"
            ),
            "    finite[b] = largest_of(converted<i32>(top));",
            "}",
            "i32 poisoned;",
            *declared,
            f"{{ {TYPES[operation.scale_storage]} codes;",
            f"  block_scale_of(finite, most{self._whole}, codes, poisoned{passed});",
            "  if (scales) store(scales + first, codes, count); }",
            "for (long b = 0; b < count; b++) {",
            "    const auto numbers_of = numbers + begin(first + b);",
            "    const long stop = size(first + b);",
            *kept,
        ]
        load = f"load<{kind}>(numbers_of + e, n)"
        if operation.kind == "quantize":
            lines += [
                f"    auto target = ({SCALARS[operation.storage]}*)elements + begin(first + b);",
                "    if (poisoned[b]) {",
                *_over_block(f"store(target + e, splat<{kind}>({own.nan}), n);"),
                "        continue;",
                "    }",
                *_over_block(f"{self._element(load, kind, 'result')} store(target + e, result, n);"),
            ]
        else:
            lines += [
                f"    auto target = {self._place};",
                *_over_block(f"{self._element(load, TYPES[operation.element_storage], 'code')} {self._stored}"),
            ]
        return [*lines, "}"]

    def _decode(self) -> list[str]:
        operation = self.operation
        kind, code, scale = (TYPES[d] for d in (operation.storage, operation.element_storage, operation.scale_storage))
        declared, passed, kept, taken = _carried(self.stages["unit_of"].results)
        load = f"load_packed(source + {self._byte}, n)" if operation.packed else f"load<{code}>(source + e, n)"
        return [
            *declared,
            f"unit_of(load<{scale}>(scales + first, count){self._whole}{passed});",
            "for (long b = 0; b < count; b++) {",
            f"    const auto source = {self._place};",
            "    auto target = numbers + begin(first + b);",
            "    const long stop = size(first + b);",
            *kept,
            *_over_block(f"{kind} value; value_of({load}{taken}, value); store(target + e, value, n);"),
            "}",
        ]


def _over_block(body: str) -> list[str]:
    """A loop over the elements of a block, a vector at a time: `e` is where it begins, `n` how many there are."""
    return [
        "    {",
        f"        const auto body = [&](long e, long n) __attribute__((always_inline)) {{ {body} }};",
        "        long e = 0;",
        "        for (; e + LANES <= stop; e += LANES) body(e, LANES);",
        "        if (e < stop) body(e, stop - e);",
        "    }",
    ]


def _carried(values: Sequence[Value]) -> tuple[list[str], str, list[str], str]:
    """What the stage of elements gets from the stage of blocks: declarations, arguments of the one, a block's own numbers, and
    arguments of the other."""
    kinds = [TYPES[v.dtype] for v in values]
    return (
        [f"{kind} of_blocks{i};" for i, kind in enumerate(kinds)],
        "".join(f", of_blocks{i}" for i in range(len(kinds))),
        [f"    const {kind} own{i} = spread(of_blocks{i}, b);" for i, kind in enumerate(kinds)],
        "".join(f", own{i}" for i in range(len(kinds))),
    )
