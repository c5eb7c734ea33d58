"""Timelines as pictures for documents.

svg           the drawing
look          its width, letters, theme, and greys
picture_file  it as a file, also as PDF and PNG
"""
