"""Conversions that replace TVM's, which were wrong, missing or failing in TVM 0.27; comments at each say how.

``tests/tvm_split/frontends/test_torch_sweep.py`` compares each with torch.
"""
