"""What no plan of a choice can be below, so that most choices need not be tried. In reading order:

least_work    what layers take at the least
warm_up       what devices can do before the first backward
end_devices   what the device with the first or the last layers takes
bound         all bounds of a choice, and of given cuts
fixed_order   what a choice takes whose order is known
lower_bounds  these for the devices of a search
"""
