"""What a step of given stages would take and hold, in reading order:

messages   bytes that wait to be taken by another device
footprint  bytes of each device at its peak
breakdown  where the time of a step goes
"""
