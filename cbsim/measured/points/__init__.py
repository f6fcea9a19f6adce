"""Published measurements of whole servers, predicted: points, flags, terms, scores."""
