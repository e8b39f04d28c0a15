"""Tests of runtime_stub, against small runners written by hand."""
