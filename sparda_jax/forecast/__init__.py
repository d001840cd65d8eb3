"""SparDA's Forecast: the projection, its files, a whole-sequence forward, loss."""
