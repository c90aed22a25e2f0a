"""Drivers of other libraries through their public interfaces; each runs in an environment that has the library.

    cd examples/benchmarks && PYTHON -m peers.dattri_llm --model llama34m --documents 32 --repeats 3

A driver prints a line of JSON for each configuration. None imports tdasearch.
"""
