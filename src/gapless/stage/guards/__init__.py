"""What could go wrong without a word. Each file says what it protects, when it looks and what it says.

forward_restart   a forward that starts again leaves no trace
state/            what layers hold besides parameters and buffers, for runs that must not count; and what layers of two
                  stages hold, which must not change
changing_buffers  buffers that a forward changes, and a second run must not
stored_tensors    tensors that layers keep in attributes, where nobody should read them; `tripwire`: who does is told
weight_changes    weights that change while a step runs; `grad_fields`: their `.grad` and `.requires_grad`
data_writes       `.data` of a weight, and backwards of a layer's own
process_state     what torch keeps once for all threads, whenever a layer touches it
blind_spots       where these can't look
"""
