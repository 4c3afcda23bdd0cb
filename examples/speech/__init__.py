"""How the example adapters learn to speak: plain answers, ways to say them, questions to ask."""
