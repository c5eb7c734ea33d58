"""What a user asks for.

checks              of a pipeline: a fact, its numbers and the way out where it can't be done
habits              of users of other libraries: what they try first works here, or they are told what does
schedule_arguments  of the schedule, with what a plan brings
stream_arguments    of a stream
training_arguments  of an optimizer whose step does not wait
training_habits     what the steps of that optimizer must not meet
"""
