"""lowp's collectives beside torch's on links of a known speed: two and four network namespaces, gloo, one rank in each.

    python -m benchmarks links                     every link, 2 and 4 ranks, 2^22 to 2^25 elements, a DDP step, 2 x 2 ranks
    python -m benchmarks links --quick             two links, 2 ranks and 2 x 2 ranks, 2^24 elements: a few minutes
    python -m benchmarks links --rates 1gbit --ranks 2 --sizes 24 --only 'fp16|e5m2' --sections collective

Needs root, and `ip` and `tc` of iproute2. Nothing on the host's own interfaces is touched. An estimate of the time is printed
first. Beside each time stand the time that the link needs for the bytes that were sent, what remains, and the processor time of
the busiest rank. Results go to benchmarks/results/<machine>-wire.json (every round) and .md.
"""

from benchmarks.links.run import main

if __name__ == "__main__":
    main()
