"""Cuts cover everything once, whatever the sizes."""

from hypothesis import given
from hypothesis import strategies as st

from lowp.wire.codec import codec_of
from lowp.wire.plan import Layer, chunks_of

CODECS = [codec_of(name) for name in ("e5m2", "e2m1fn", "fp32", "topk:0.1")]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from(CODECS)), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 700),
    st.integers(1, 700),
)
def test_every_element_is_in_one_part(sizes, shards, chunk, longest):
    layers = tuple(Layer(f"{i}", size, codec, i) for i, (size, codec) in enumerate(sizes))
    seen = {i: [] for i in range(len(layers))}
    position = 0
    for piece in chunks_of(layers, shards, (chunk, longest)):
        assert piece.start == position
        position = piece.stop
        assert len(piece.shards) == shards
        inside = 0
        for shard in piece.shards:
            assert shard.start == inside
            inside = shard.stop
            assert sum(part.size for part in shard.parts) == shard.size
            for part in shard.parts:
                assert 0 < part.size <= longest
                seen[part.layer].extend(range(part.start, part.start + part.size))
        assert inside == piece.size
    assert position == sum(layer.size for layer in layers)
    for i, layer in enumerate(layers):
        assert seen[i] == list(range(layer.size))


def test_shards_take_the_same_number_of_bytes():
    wide, narrow = codec_of("fp32"), codec_of("e2m1fn")  # with a scale for every 32 numbers
    layers = (Layer("a", 80_000, narrow, 0), Layer("b", 10_000, wide, 1))
    (chunk,) = chunks_of(layers, 4, (1 << 20, 1 << 20))
    lengths = [sum(part.codec.wire_bytes(part.size) for part in shard.parts) for shard in chunk.shards]
    assert max(lengths) - min(lengths) < 200
