"""The engine under the training loops of others.

* :mod:`tonnage.engine.integrations.transformers`: Hugging Face's ``Trainer``.
* :mod:`tonnage.engine.integrations.accelerate`: Hugging Face's ``Accelerator``.
* :mod:`tonnage.engine.integrations.lightning`: ``Strategy``.
* :mod:`tonnage.engine.integrations.ray`: ``prepare_model`` for Ray Train.

Each is imported by its own name, and loads its framework then.
"""
