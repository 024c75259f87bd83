"""One module per notebook: ``nbNN.py`` holds the exercises of notebook NN (the interface: ``course/exercise.py``)."""
