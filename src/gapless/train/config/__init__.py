"""A config and what it names, in reading order:

keys       what a key of a config is: read, checked, and explained in one place
tables     all keys, table by table
config     a TOML file that says what to train
manual     the page of all keys, and a commented config
user_code  the functions that a config names, found and called
"""
