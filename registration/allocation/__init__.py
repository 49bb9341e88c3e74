"""Cross-layer KV memory for engines that do not allocate it themselves; needs torch.

allocate   allocates tensors, and makes the layers' views and the references
layouts    decides where every layer's pages go, before a byte is allocated
layers     what each layer needs: its pages, by group
contents   what a page can hold: attention tensors, opaque tensors, recurrent states
strided    one tensor with named axes, in some memory order
"""
