"""The report: one HTML file that opens without a network.

`document.py` gathers every number of the page into one JSON document. The page holds it in a block that programs can read, and
its script draws all figures from that block. So nothing is shown that is not there.
"""
