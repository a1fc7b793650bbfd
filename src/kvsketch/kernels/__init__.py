"""Fast forms of ``attend``, each tested against its plain form.

The ``triton_*`` modules import Triton, which need not be installed. Call
``triton_support.available(device)`` before importing one.
"""
