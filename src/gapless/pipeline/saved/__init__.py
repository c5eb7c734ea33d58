"""What of a pipeline goes into a checkpoint, in reading order:

saved_model      the model, the loss where it learns, and random numbers
saved_optimizer  the optimizer and the scheduler of a user, under the names of parameters
saved_pipeline   these together
saved_stream     a stream: the model, and what every stage has beside it

partial_state      the state dict of a model that other ranks train in part
pretrained_folder  the weights alone, as Hugging Face reads them
"""
