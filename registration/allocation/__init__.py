"""Cross-layer KV memory for engines that do not allocate it themselves; needs torch.

allocate   allocates tensors, and makes the layers' views and the references
named      the same in a layout that vLLM names, such as BHLNC
placement  decides where every layer's pages go, before a byte is allocated
layers     what each layer needs: its pages, by group
contents   what a page can hold: attention tensors, opaque tensors, recurrent states
strided    one tensor with named axes, in some memory order
"""

from registration.allocation.allocate import Allocation, KVCacheAllocation, allocate
from registration.allocation.contents import (
    AttentionTensor,
    OpaqueTensor,
    StateTensor,
    StateTensors,
)
from registration.allocation.layers import GroupPages, LayerPages, LayerRefused
from registration.allocation.named import allocate_in, attention_in
from registration.allocation.placement import HeadMajor, HeadMajorRefused, RowOrder
from registration.allocation.strided import Axis, LayerView

__all__ = [
    "Allocation",
    "AttentionTensor",
    "Axis",
    "GroupPages",
    "HeadMajor",
    "HeadMajorRefused",
    "KVCacheAllocation",
    "LayerPages",
    "LayerRefused",
    "LayerView",
    "OpaqueTensor",
    "RowOrder",
    "StateTensor",
    "StateTensors",
    "allocate",
    "allocate_in",
    "attention_in",
]
