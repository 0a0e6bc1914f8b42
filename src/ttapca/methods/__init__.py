"""Methods of the literature, each a short recipe in a file of its own.

A recipe turns a filter and options into a `Plan`: the surfaces that may change, and the mover that
moves them. What several methods share is a surface, an objective or a mover of the library; what is
a method's own stands in its file.
"""
