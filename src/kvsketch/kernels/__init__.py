"""Fast forms of ``attend`` and of what compressing costs, each tested against its plain form.

The ``triton_*`` modules import Triton, which need not be installed: ask
``triton_support.available(device)`` before importing one.
"""
