"""Plans that the search does not choose from, since they have no flush, or can't be run yet. In reading order:

stage_times   how long a replicated stage takes, and the hops around it
replicate     PipeDream's planner: stages that are replicated each on its own
alternatives  pipedream, 2bw and dapple, listed beside the plans with what they would take
"""
