"""Packed rows told by positions alone raise in models that do not read them."""

import types

import pytest
import torch
import transformers
from packaging.version import Version
from tools import model_zoo
from tools.families import TABLE, UNTESTED, each_family
