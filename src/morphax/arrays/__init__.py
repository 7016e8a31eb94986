"""Ready-made array types. Each stands in one file and uses the public API only."""

from ._lora import LoraArray as LoraArray
from ._quantized import QuantizedArray as QuantizedArray
