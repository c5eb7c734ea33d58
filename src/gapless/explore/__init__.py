"""The explorer: a local page on which sliders redraw schedules. No torch. In reading order:

question      what the page asks: a schedule, its sizes and its costs, within limits; and the answer: its timeline, and
              the command and the Python line that give the same
explore_page  the page itself: the page of timelines, with a panel of sliders
workers       processes that make the answers
server        serves the page and its answers to this machine, and to nobody else

panel.html    the panel, in `templates/`; its style sheet is explore.css, in `styles/`
explore.js    in `scripts/`: sends what the sliders say, and shows the answers
"""
