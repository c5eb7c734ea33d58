"""Checkpoints: files on disk that appear whole or not at all, and fit any number of devices and ranks:

saveable      what can be saved and goes on from what was
contents      what is to be saved, as trees of values with tensors beside them
tree          trees of values as JSON
pieces        tensors as blocks of bytes, in safetensors files
manifest      what a checkpoint is, where its bytes are, and their hashes
save          from memory to a checkpoint that is there
held_folder   who is at work in a folder
disk          what a save does to the disk, one method each
opened        a checkpoint to be read
random_state  the random numbers of a process
"""
