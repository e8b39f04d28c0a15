"""Temporary: the numbers of the optimizers."""

import numpy as np


def sgd_numbers(lr, momentum=0.0, weight_decay=0.0):
    return np.array([lr, momentum, weight_decay], dtype=np.float32)


def adam_numbers(lr, step, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
    (b1, b2), t = betas, step
    return np.array([lr, b1, 1 - b1, b2, 1 - b2, eps, weight_decay, 1 - b1**t, 1 - b2**t], dtype=np.float32)
