"""Codes of a group of 64 numbers in adaptive messages (adaptive.py), as C++: how they are found, written and read.

A plane is 8 bytes: one bit of each code. Codes are 64 bytes, in one register with AVX-512 and in two with AVX2; one instruction
takes a bit of every byte of a register. Tables of the curve and of its values are looked up in registers as well.
adaptive_cpp.py defines these tables, and what else is used here.
"""

WRITE_CODES = r"""
INLINE void write_planes(uint8_t* to, int width, const uint8_t* codes) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_loadu_si512(codes);
    for (int p = 0; p < width; p++) {
        const uint64_t plane = _mm512_test_epi8_mask(all, _mm512_set1_epi8(128 >> p));
        memcpy(to + 8 * p, &plane, 8);
    }
#elif defined(__AVX2__)
    __m256i low = _mm256_loadu_si256((const __m256i*)codes), high = _mm256_loadu_si256((const __m256i*)codes + 1);
    for (int p = 0; p < width; p++) {
        const uint32_t plane[2] = {(uint32_t)_mm256_movemask_epi8(low), (uint32_t)_mm256_movemask_epi8(high)};
        memcpy(to + 8 * p, plane, 8);
        low = _mm256_add_epi8(low, low);
        high = _mm256_add_epi8(high, high);
    }
#else
    for (int p = 0; p < width; p++)
        for (int i = 0; i < 8; i++) {  // the lowest bits of eight bytes, moved to the highest byte
            uint64_t eight; memcpy(&eight, codes + 8 * i, 8);
            to[8 * p + i] = (eight >> (7 - p) & 0x0101010101010101ull) * 0x0102040810204080ull >> 56;
        }
#endif
}
#if STOCHASTIC
INLINE void write_codes(const f32* x, f32 factor, int width, uint8_t* to, const int32_t* keys, long parts, long part,
                        long first) {
    alignas(64) uint8_t codes[64];
    const float most = (float)((1 << width) - 1);
    for (int v = 0; v < VECTORS; v++) {
        f32 place = (x[v] * factor + splat<f32>(1.0f)) * splat<f32>(most * 0.5f);
        place = smaller(larger(place, f32{}), splat<f32>(most));
        const f32 below = integer_below(place);
        i32 index = splat<i32>((int32_t)first + LANES * v + keys[5 * parts + part]) + LANE_NUMBERS;
        i32 low = index & 0xFFFF, high = index >> 16 & 0xFFFF;
        for (int round = 0; round < 5; round++) {
            const i32 product = low * (round % 2 ? 0x6E2B : 0x7A35);
            low = (product >> 16) ^ high ^ keys[round * parts + part];
            high = product & 0xFFFF;
        }
        const f32 noise = __builtin_convertvector(((high << 14) + (low >> 2)) >> 6, f32) * splat<f32>(0x1p-24f);
        const i32 code = (__builtin_convertvector(below, i32) - (noise < place - below)) << (8 - width);
        const i8 bytes = converted<i8>(code);
        memcpy(codes + LANES * v, &bytes, LANES);
    }
    write_planes(to, width, codes);
}
#else
INLINE void write_codes(const f32* x, f32 factor, int width, uint8_t* to) {
#if defined(AVX512_32) && defined(__AVX512BW__)
    const __m512i base = _mm512_load_si512(BASE), rise = _mm512_load_si512(RISE);
    __m256i half[2];
    uint64_t plane = 0;
    for (int h = 0; h < 2; h++) {
        __m256i fine[2];
        for (int v = 0; v < 2; v++) {
            const __m512 scaled = (__m512)(x[2 * h + v] * factor);
            plane |= (uint64_t)_mm512_cmp_ps_mask(scaled, _mm512_setzero_ps(), _CMP_LT_OQ) << (32 * h + 16 * v);
            const __m512 size = _mm512_min_ps(_mm512_abs_ps(scaled), _mm512_set1_ps(32767.0f));
            fine[v] = _mm512_cvtepi32_epi16(_mm512_cvttps_epi32(size));
        }
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(fine[0]), fine[1], 1);
        const __m512i segment = _mm512_srli_epi16(both, 10), rest = _mm512_slli_epi16(both, 6);
        const __m512i more = _mm512_mulhi_epu16(_mm512_permutexvar_epi16(segment, rise), rest);
        half[h] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(_mm512_add_epi16(_mm512_permutexvar_epi16(segment, base), more), 9));
    }
    memcpy(to, &plane, 8);
    const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    for (int p = 1; p < width; p++) {
        plane = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(128 >> p));
        memcpy(to + 8 * p, &plane, 8);
    }
#else
    alignas(64) uint8_t codes[64];
#if defined(AVX2_32)
    for (int h = 0; h < 2; h++) {  // 32 numbers; packing exchanges quarters of registers, which is undone at the end
        __m256i fine[4], signs[4];
        for (int v = 0; v < 4; v++) {
            const f32 scaled = x[4 * h + v] * factor;
            signs[v] = (__m256i)(scaled < 0.0f);
            fine[v] = _mm256_cvttps_epi32((__m256)smaller((f32)((i32)scaled & 0x7FFFFFFF), splat<f32>(32767.0f)));
        }
        const __m256i low = _mm256_packs_epi32(fine[0], fine[1]), high = _mm256_packs_epi32(fine[2], fine[3]);
        const __m256i segment = _mm256_packus_epi16(_mm256_srli_epi16(low, 10), _mm256_srli_epi16(high, 10));
        const auto found = [&](const uint8_t* table) __attribute__((always_inline)) {  // of 32 bytes
            const __m256i first = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
            const __m256i second = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table + 1));
            return _mm256_blendv_epi8(_mm256_shuffle_epi8(first, segment), _mm256_shuffle_epi8(second, segment),
                                      _mm256_slli_epi16(segment, 3)); };
        const __m256i base[2] = {found(BASE_BYTES), found(BASE_BYTES + 32)};
        const __m256i rise[2] = {found(RISE_BYTES), found(RISE_BYTES + 32)};
        const auto code = [](__m256i base, __m256i rise, __m256i fine) {
            return _mm256_srli_epi16(_mm256_add_epi16(base, _mm256_mulhi_epu16(rise, _mm256_slli_epi16(fine, 6))), 9); };
        const __m256i bytes = _mm256_packus_epi16(
            code(_mm256_unpacklo_epi8(base[0], base[1]), _mm256_unpacklo_epi8(rise[0], rise[1]), low),
            code(_mm256_unpackhi_epi8(base[0], base[1]), _mm256_unpackhi_epi8(rise[0], rise[1]), high));
        const __m256i sign = _mm256_packs_epi16(_mm256_packs_epi32(signs[0], signs[1]), _mm256_packs_epi32(signs[2], signs[3]));
        const __m256i whole = _mm256_or_si256(bytes, _mm256_and_si256(sign, _mm256_set1_epi8((char)128)));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_store_si256((__m256i*)codes + h, _mm256_permutevar8x32_epi32(whole, order));
    }
#else
    for (int i = 0; i < 64; i++) {
        const float scaled = x[i / LANES][i % LANES] * factor[0], size = scaled < 0 ? -scaled : scaled;
        const int fine = size < 32767.0f ? (int)size : 32767, segment = fine >> 10;
        codes[i] = (BASE[segment] + (RISE[segment] * (fine & 1023) >> 10)) >> 9 | (scaled < 0 ? 128 : 0);
    }
#endif
    write_planes(to, width, codes);
#endif
}
#endif
"""

READ_CODES = r"""
// What the codes of a group stand for.
INLINE void read_codes(const uint8_t* from, int width, f32* x) {
#if defined(AVX512_32) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
    uint64_t sign;
    memcpy(&sign, from, 8);
    __m512i codes = _mm512_setzero_si512();
    const __m512i one = _mm512_set1_epi8(1);
#if STOCHASTIC
    codes = _mm512_maskz_mov_epi8(sign, one);
#endif
    for (int p = 1; p < width; p++) {
        uint64_t plane;
        memcpy(&plane, from + 8 * p, 8);
        codes = _mm512_add_epi8(codes, codes);
        codes = _mm512_mask_add_epi8(codes, plane, codes, one);
    }
    __m512i words[2];
#if STOCHASTIC
    const __m512i first = _mm512_set1_epi16(1 - (1 << width));
    for (int h = 0; h < 2; h++) {
        const __m512i wide = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes));
        words[h] = _mm512_add_epi16(_mm512_add_epi16(wide, wide), first);
    }
#else
    const uint8_t *low = LOW + 128 * width, *high = HIGH + 128 * width;
    const __m512i lows = _mm512_permutex2var_epi8(_mm512_load_si512(low), codes, _mm512_load_si512(low + 64));
    const __m512i highs = _mm512_permutex2var_epi8(_mm512_load_si512(high), codes, _mm512_load_si512(high + 64));
    for (int h = 0; h < 2; h++) {
        const __m512i l = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(lows, 1) : _mm512_castsi512_si256(lows));
        const __m512i u = _mm512_cvtepu8_epi16(h ? _mm512_extracti64x4_epi64(highs, 1) : _mm512_castsi512_si256(highs));
        const __m512i both = _mm512_or_si512(l, _mm512_slli_epi16(u, 8));
        words[h] = _mm512_mask_sub_epi16(both, (__mmask32)(sign >> (32 * h)), _mm512_setzero_si512(), both);
    }
#endif
    for (int v = 0; v < VECTORS; v++) {
        const __m256i own = v % 2 ? _mm512_extracti64x4_epi64(words[v / 2], 1) : _mm512_castsi512_si256(words[v / 2]);
        x[v] = (f32)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(own));
    }
#elif defined(AVX2_32)
    const __m256i eighths = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    const auto mask = [&](int p, int h) __attribute__((always_inline)) {  // a byte of ones for each bit of half a plane
        int32_t plane;
        memcpy(&plane, from + 8 * p + 4 * h, 4);
        const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(plane), eighths), bit);
        return _mm256_cmpeq_epi8(own, bit); };
    for (int h = 0; h < 2; h++) {
        const __m256i sign = mask(0, h);
        __m256i codes = STOCHASTIC ? _mm256_sub_epi8(_mm256_setzero_si256(), sign) : _mm256_setzero_si256();
        for (int p = 1; p < width; p++) codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), mask(p, h));
        __m256i words[2];
#if STOCHASTIC
        const __m256i first = _mm256_set1_epi16(1 - (1 << width));
        for (int q = 0; q < 2; q++) {
            const __m128i own = q ? _mm256_extracti128_si256(codes, 1) : _mm256_castsi256_si128(codes);
            const __m256i wide = _mm256_cvtepu8_epi16(own);
            words[q] = _mm256_add_epi16(_mm256_add_epi16(wide, wide), first);
        }
#else
        __m256i lows = _mm256_setzero_si256(), highs = _mm256_setzero_si256();
        for (int first = 0; first < 1 << (width - 1); first += 16) {  // 16 values at a time; others have their highest bit set
            const __m256i own = _mm256_adds_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(first)), _mm256_set1_epi8(0x70));
            const auto found = [&](const uint8_t* table) __attribute__((always_inline)) {
                const __m128i values = _mm_load_si128((const __m128i*)(table + 128 * width + first));
                return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), own); };
            lows = _mm256_or_si256(lows, found(LOW));
            highs = _mm256_or_si256(highs, found(HIGH));
        }
        for (int q = 0; q < 2; q++) {
            const auto wide = [&](__m256i x) { return q ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x); };
            const __m256i minus = _mm256_cvtepi8_epi16(wide(sign)), l = _mm256_cvtepu8_epi16(wide(lows));
            const __m256i both = _mm256_or_si256(l, _mm256_slli_epi16(_mm256_cvtepu8_epi16(wide(highs)), 8));
            words[q] = _mm256_sub_epi16(_mm256_xor_si256(both, minus), minus);
        }
#endif
        for (int v = 0; v < 4; v++) {
            const __m128i own = v % 2 ? _mm256_extracti128_si256(words[v / 2], 1) : _mm256_castsi256_si128(words[v / 2]);
            x[4 * h + v] = (f32)_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(own));
        }
    }
#else
    uint64_t planes[8];
    memcpy(planes, from, 8 * width);
    for (int i = 0; i < 64; i++) {
        int code = 0;
        for (int p = 0; p < width; p++) code = code << 1 | (int)(planes[p] >> i & 1);
        x[i / LANES][i % LANES] = (float)VALUES[256 * width + code];
    }
#endif
}
"""
