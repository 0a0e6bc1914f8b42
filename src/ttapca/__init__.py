"""Test-time adaptation with principal component analysis.

    fitted = ttapca.fit(model, layer="conv1", data=train_loader, n_components=2000)
    adapted = ttapca.adapt(model, "wiener", filter=fitted)    # or "ttapca-relu", "tent", "bn", ...
    logits = adapted(batch)                # predicts and adapts
    with adapted.disabled():               # the untouched model, bit for bit
        plain = model(batch)
    adapted.detach()                       # leaves no trace

`fit` decomposes the output of one layer on source data, and `adapt` puts a method on the model.
The other names are the parts that these two are made of. See the README for a tour.

A name is imported when it is first used, because torch takes seconds to import, and neither the
help of the command line nor the packages for data need it. `__init__.pyi` lists them.
"""

from ttapca.support.lazy import lazy_names

__version__ = "0.2.0"
__all__, __getattr__, __dir__ = lazy_names(__name__, __file__, "__version__")
