"""The timeline of a step: cases that can be worked out by hand, and what must hold for all."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowp.predict.exchange_cost import ChunkCost, ChunkStep
from lowp.predict.timeline import BucketJob, step_times


def chunk(*steps):
    return ChunkCost(tuple(ChunkStep(*step) for step in steps), 0.0, 0.0, 0)


def plain(seconds):
    """A transfer without work."""
    return chunk((0, 0, seconds), (0, 0))


def test_nothing_to_send():
    times = step_times(1.0, [], 1)
    assert (times.step, times.compute, times.exposed, times.hidden) == (1.0, 1.0, 0.0, 0.0)


def test_a_transfer_that_backward_hides():
    times = step_times(1.0, [BucketJob(0.2, (plain(0.5),)), BucketJob(1.0, (plain(0.1),))], 1)
    assert times.step == pytest.approx(1.1)
    assert times.hidden == pytest.approx(0.5)
    assert times.exposed == pytest.approx(0.1)


def test_the_link_carries_buckets_in_order():
    """Ready at .2, .4 and 1: .2 - .9, .9 - 1.6, 1.6 - 1.8."""
    jobs = [BucketJob(0.2, (plain(0.7),)), BucketJob(0.4, (plain(0.7),)), BucketJob(1.0, (plain(0.2),))]
    times = step_times(1.0, jobs, 1)
    assert times.step == pytest.approx(1.8)
    assert times.exposed == pytest.approx(0.8)
    assert times.hidden == pytest.approx(0.8)


def test_encoding_takes_its_time_from_the_computation():
    """Ready at .5: encode to .6, send to .8, decode to .9 (the computation ends at 1.2); ready at 1.2: encode, send, decode."""
    one = chunk((0, 0.1, 0.2), (0.1, 0))
    times = step_times(1.0, [BucketJob(0.5, (one,)), BucketJob(1.0, (one,))], 1)
    assert times.step == pytest.approx(1.6)
    assert times.encode == pytest.approx(0.2)
    assert times.decode == pytest.approx(0.2)
    assert times.exposed == pytest.approx(0.2)
    assert times.hidden == pytest.approx(0.2)


def test_what_runs_beside_the_computation_takes_nothing_from_it():
    one = chunk((0, 0.1, 0.2), (0.1, 0))
    times = step_times(1.0, [BucketJob(0.5, (one,)), BucketJob(1.0, (one,))], 1, beside=1.0)
    assert times.step == pytest.approx(1.4)
    assert times.encode == pytest.approx(0.1)
    assert times.decode == pytest.approx(0.1)


def test_chunks_overlap_where_several_may_be_under_way():
    """Two chunks: the second is encoded while the first one travels."""
    one = chunk((0, 0.1, 0.3), (0.1, 0))
    assert step_times(1.0, [BucketJob(1.0, (one, one))], 1).step == pytest.approx(2.0)
    # encode .1, send .3 and .3, decode .1
    assert step_times(1.0, [BucketJob(1.0, (one, one))], 2).step == pytest.approx(1.8)


def test_latency_blocks_a_stream_and_not_a_link():
    late = chunk((0, 0, 0.1, 0.5), (0, 0))
    jobs = [BucketJob(1.0, (late, late))]
    assert step_times(1.0, jobs, 8).step == pytest.approx(1.7)
    assert step_times(1.0, jobs, 8, streamed=True).step == pytest.approx(2.2)


seconds = st.floats(0, 2)
steps = st.tuples(seconds, seconds, seconds, seconds).map(lambda values: ChunkStep(*values))
chunks = st.lists(steps, min_size=1, max_size=3).map(
    lambda found: ChunkCost((*found, ChunkStep(0.1, 0.0)), 0.0, 0.0, len(found))
)
jobs = st.lists(st.tuples(st.floats(0, 1), st.lists(chunks, max_size=3)), max_size=4).map(
    lambda found: [BucketJob(ready, tuple(own)) for ready, own in sorted(found, key=lambda each: each[0])]
)


@settings(max_examples=150)
@given(jobs, st.sampled_from([1, 2, 8]), st.floats(0, 1), st.booleans())
def test_parts_add_up_and_bounds_hold(buckets, depth, beside, streamed):
    times = step_times(1.0, buckets, depth, beside, streamed)
    travels = sum(step.busy + (step.latency if streamed else 0) for job in buckets for own in job.chunks for step in own.steps)
    work = sum(step.encode + step.decode for job in buckets for own in job.chunks for step in own.steps)
    longest = max((job.ready + own.seconds for job in buckets for own in job.chunks), default=0.0)
    assert min(times.encode, times.decode, times.exposed, times.hidden) >= 0
    assert times.step >= max(1.0, longest, travels) - 1e-9
    assert times.step <= 1.0 + sum(own.seconds for job in buckets for own in job.chunks) + 1e-9
    assert times.encode + times.decode <= work * (2 - beside) + 1e-9
    assert times.hidden <= travels + 1e-9


@settings(max_examples=100)
@given(jobs, st.floats(0.1, 1), st.sampled_from(["busy", "latency", "encode", "decode"]))
def test_a_stream_is_never_slower_with_less_to_do(buckets, factor, what):
    """Chunks follow each other (depth 1): whatever takes less time, the step does not take more."""

    def less(cost):
        return replace(cost, steps=tuple(replace(step, **{what: getattr(step, what) * factor}) for step in cost.steps))

    lighter = [replace(job, chunks=tuple(less(own) for own in job.chunks)) for job in buckets]
    usual, less_work = (step_times(1.0, each, 1, streamed=True).step for each in (buckets, lighter))
    assert less_work <= usual + 1e-9


def test_a_burst_passes_at_once_after_a_pause():
    """Half a second is saved up before the step, .2 again until the second bucket is ready."""
    jobs = [BucketJob(1.0, (plain(1.0),)), BucketJob(1.0, (plain(1.0),))]
    assert step_times(1.0, jobs, 1, burst=0.5).step == pytest.approx(2.5)
    late = [BucketJob(0.0, (plain(0.7),)), BucketJob(0.4, (plain(0.7),))]
    assert step_times(0.4, late, 1, burst=0.5).step == pytest.approx(0.4 + 0.7 - 0.2)


def test_a_burst_spares_no_latency():
    """On a stream, which waits until a message is there."""
    sent = ChunkCost((ChunkStep(0, 0, 0.1, 0.5), ChunkStep(0, 0)), 0.0, 0.0, 0)
    jobs = [BucketJob(1.0, (sent,))]
    assert step_times(1.0, jobs, 1, streamed=True).step == pytest.approx(1.6)
    assert step_times(1.0, jobs, 1, streamed=True, burst=3.0).step == pytest.approx(1.5)


def test_a_burst_spares_no_overhead():
    """A token bucket lets bytes pass; what a message costs besides it still costs."""
    sent = ChunkCost((ChunkStep(0, 0, 0.4, overhead=0.3), ChunkStep(0, 0)), 0.0, 0.0, 0)
    assert step_times(1.0, [BucketJob(1.0, (sent,))], 1, burst=3.0).step == pytest.approx(1.3)


def test_messages_that_the_processor_handles_delay_the_computation():
    sent = ChunkCost((ChunkStep(0, 0, 0.2, 0, 0.1), ChunkStep(0, 0)), 0.0, 0.0, 0)
    times = step_times(1.0, [BucketJob(0.5, (sent,))], 1)
    assert times.step == pytest.approx(1.1)
    assert times.exposed == pytest.approx(0.1)
    after = step_times(1.0, [BucketJob(1.0, (sent,))], 1)  # nobody computes any more
    assert after.step == pytest.approx(1.2)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.2)), min_size=1, max_size=6),
    st.floats(0, 0.3),
    st.floats(0, 0.3),
    st.floats(0, 2),
)
@settings(max_examples=60)
def test_more_burst_and_less_handling_are_never_slower(buckets, burst, more, factor):
    def jobs(scale):
        own = [
            BucketJob(ready, (ChunkCost((ChunkStep(0, 0, busy, 0, scale * handling), ChunkStep(0, 0)), 0.0, 0.0, 0),))
            for ready, busy, handling in buckets
        ]
        return sorted(own, key=lambda job: job.ready)

    base = step_times(1.0, jobs(factor), 1, burst=burst).step
    assert step_times(1.0, jobs(0.0), 1, burst=burst).step <= base + 1e-9
    without = step_times(1.0, jobs(0.0), 1, burst=burst).step
    assert step_times(1.0, jobs(0.0), 1, burst=burst + more).step <= without + 1e-9
