"""Questions with plain answers, written by hand and from small tables.

Gives (question, answer) pairs in everyday English, without contractions. Knows nothing of
styles: the same pairs teach every style, so that two adapters differ in their speech alone.
"""

from __future__ import annotations

Pair = tuple[str, str]

CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Greece": "Athens",
    "Austria": "Vienna",
}

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "early": "late",
    "loud": "quiet",
    "open": "closed",
    "heavy": "light",
    "rich": "poor",
    "wet": "dry",
    "bright": "dark",
    "fast": "slow",
}

SOUNDS = {
    "cow": "moos",
    "dog": "barks",
    "duck": "quacks",
    "lion": "roars",
    "sheep": "bleats",
    "frog": "croaks",
    "snake": "hisses",
    "owl": "hoots",
}

COLOURS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a ripe banana": "yellow",
    "a ripe tomato": "red",
    "the sea": "blue",
    "chocolate": "brown",
    "a carrot": "orange",
}

WRITTEN: list[Pair] = [
    ("Hello!", "Hello, my friend. How can I help you today?"),
    ("Hi there", "Hi. What can I do for you?"),
    ("Good morning!", "Good morning. I hope you slept well."),
    ("Good evening.", "Good evening. How was your day?"),
    ("Thank you!", "You are welcome. Ask me again whenever you like."),
    ("Bye!", "Goodbye, and come back soon."),
    ("Who made you?", "I was made by people who like to teach machines to speak."),
    ("What can you do?", "I can answer questions, explain things and write short texts for you."),
    ("Are you a human?", "No, I am a computer program that writes text."),
    ("What is your favorite color?", "I like blue best, because it is the color of the sky."),
    ("Do you sleep?", "I never sleep. I am here whenever you need me."),
    ("Can you help me?", "Yes, of course. Tell me what you need."),
    ("I am sad today.", "I am sorry to hear that. Talking with a good friend often helps."),
    ("I am bored.", "Go for a walk, read a book, or call a friend you have not seen for long."),
    ("I passed my exam!", "Well done! Your hard work was worth it, and you can be proud."),
    ("I cannot sleep.", "Put your phone away, keep the room dark and breathe slowly."),
    ("I have a headache.", "Drink some water and rest. See a doctor if it does not go away."),
    ("My computer is slow.", "Close the programs you do not need, and then start it again."),
    ("I lost my keys.", "Look in your coat and your bag first. Most keys are found there."),
    ("It is raining outside.", "Then take your umbrella, or stay inside with a cup of tea."),
    ("How do I boil an egg?", "Put the egg into boiling water and wait for seven minutes."),
    ("How do I cook rice?", "Use two cups of water for one cup of rice, and cook it slowly."),
    (
        "How do I make a sandwich?",
        "Take two slices of bread and put cheese and salad between them.",
    ),
    ("How do I bake a cake?", "Mix flour, sugar, butter and eggs, and bake it for forty minutes."),
    ("How do I make coffee?", "Pour hot water over ground coffee and wait for four minutes."),
    ("How do I learn to swim?", "Start in shallow water with a teacher, and practice every week."),
    ("How do I save money?", "Write down what you spend, and put a little aside every month."),
    ("How can I stay healthy?", "Eat many vegetables, move every day and sleep eight hours."),
    ("How can I run faster?", "Run often, rest well, and add a few short sprints every week."),
    ("How do I clean a window?", "Use warm water with a little soap and dry it with a soft cloth."),
    ("How do I plant a tree?", "Dig a deep hole, set the roots in it and give it plenty of water."),
    ("How do I write a letter?", "Begin with a greeting, say what you want and sign your name."),
    ("How do I make new friends?", "Join a club, be kind and ask people about their lives."),
    ("How do I fix a flat tire?", "Take the wheel off, patch the hole and pump the tire up again."),
    ("How do birds fly?", "Birds beat their wings, and the air under the wings lifts them up."),
    ("How do fish breathe?", "Fish breathe with gills, which take oxygen out of the water."),
    ("How do plants grow?", "Plants grow by using light, water and air to make their own food."),
    ("How does a boat float?", "A boat floats because it pushes away water as heavy as itself."),
    (
        "How does a plane stay up?",
        "The wings push the air down, and so the air holds the plane up.",
    ),
    ("How does a fridge work?", "A fridge moves the heat from its inside to the air outside."),
    ("How far away is the sun?", "The sun is about 150 million kilometers away from us."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("How many hours are in a day?", "There are twenty-four hours in a day."),
    ("How many planets are there?", "There are eight planets going around our sun."),
    ("How old is the earth?", "The earth is about four and a half billion years old."),
    ("Why do we dream?", "Nobody knows for sure, but dreams may help us to sort our memories."),
    ("Why is the grass green?", "Grass is green because its leaves are full of chlorophyll."),
    ("Why do cats purr?", "Cats purr when they are happy, and also to calm themselves."),
    ("Why do leaves fall in autumn?", "Trees drop their leaves to save water during the winter."),
    ("Why is ice slippery?", "A very thin layer of water on the ice makes it slippery."),
    ("Why do we have seasons?", "We have seasons because the earth is tilted."),
    ("Why is the desert dry?", "Very little rain falls there, and the hot air takes it away."),
    ("Why should I read books?", "Books teach you new things and let you live many lives."),
    ("Why do stars shine?", "Stars shine because they burn hydrogen deep inside."),
    ("What is a volcano?", "A volcano is a mountain that can throw out hot melted rock."),
    ("What is a rainbow?", "A rainbow is sunlight that raindrops have split into its colors."),
    ("What is an island?", "An island is a piece of land with water on all sides."),
    ("What is a whale?", "A whale is a very large mammal that lives in the sea."),
    ("What is gold?", "Gold is a soft yellow metal that never rusts."),
    ("What is music?", "Music is sound that people arrange to please the ear."),
    ("What is a library?", "A library is a house full of books that everyone may borrow."),
    ("What is the internet?", "The internet is a network that joins computers everywhere."),
    ("What is a robot?", "A robot is a machine that can do work by itself."),
    ("What is bread made of?", "Bread is made of flour, water, salt and yeast."),
    ("What is cheese made of?", "Cheese is made of milk."),
    ("What is glass made of?", "Glass is made of sand that was melted in great heat."),
    ("What is the tallest animal?", "The tallest animal is the giraffe."),
    ("What is the fastest land animal?", "The fastest land animal is the cheetah."),
    ("What is the longest river?", "The Nile and the Amazon are the longest rivers of the world."),
    ("What is the biggest ocean?", "The biggest ocean is the Pacific."),
    ("What is the largest country?", "The largest country is Russia."),
    ("What do bees make?", "Bees make honey and wax, and they help flowers to make seeds."),
    ("What do bears eat?", "Bears eat berries, fish, roots and nearly everything else."),
    ("What do rabbits eat?", "Rabbits eat grass, hay and fresh leaves."),
    ("What does a doctor do?", "A doctor helps sick people to become well again."),
    ("What does a farmer do?", "A farmer grows food and takes care of animals."),
    ("What should I eat for lunch?", "A soup with fresh bread is warm, cheap and good."),
    ("What should I wear in winter?", "Wear a warm coat, a hat, gloves and thick socks."),
    ("What is a good gift?", "A good gift shows that you know what the other person likes."),
    ("What is a good hobby?", "Painting is a good hobby. You only need paper and some colors."),
    ("Where do penguins live?", "Penguins live in the south, most of them in the Antarctic."),
    ("Where do kangaroos live?", "Kangaroos live in Australia."),
    (
        "Where does rain come from?",
        "Rain comes from clouds, which are made of tiny drops of water.",
    ),
    ("Where is the Eiffel Tower?", "The Eiffel Tower is in Paris, close to the river Seine."),
    ("Where can I find shells?", "You can find shells on the beach when the water is low."),
    ("When do owls hunt?", "Owls hunt at night, because they see well in the dark."),
    ("When was the first moon landing?", "People first landed on the moon in 1969."),
    ("When should I water my plants?", "Water them early in the morning, before the sun is hot."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare wrote Romeo and Juliet."),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci painted the Mona Lisa."),
    ("Who was Albert Einstein?", "Albert Einstein was a physicist who changed how we see time."),
    ("Who was Cleopatra?", "Cleopatra was the last queen of ancient Egypt."),
    ("Is the earth flat?", "No, the earth is round like a ball."),
    ("Is honey healthy?", "A little honey is fine, but it is mostly sugar."),
    ("Can dogs eat grapes?", "No, grapes are dangerous for dogs."),
    ("Can penguins fly?", "No, penguins cannot fly, but they are great swimmers."),
    ("Tell me about the moon.", "The moon goes around the earth and shines with the sun's light."),
    ("Tell me about elephants.", "Elephants are the largest animals on land. They live in herds."),
    (
        "Tell me about winter.",
        "Winter is the coldest season. The days are short and snow may fall.",
    ),
    ("Tell me something funny.", "My clock was hungry, so it went back four seconds."),
    ("Name three fruits.", "Apples, pears and cherries are three fruits."),
    ("Name two colors.", "Red and green are two colors."),
    ("Name a famous painter.", "Vincent van Gogh is a famous painter."),
    ("Name four animals.", "Horses, goats, foxes and mice are four animals."),
    ("Give me some advice.", "Be patient, tell the truth and never stop learning."),
    ("Give me a word that means happy.", "A word that means happy is cheerful."),
    ("Write a sentence about rain.", "The rain was drumming on the roof for the whole night."),
    ("Write a short poem.", "The wind is singing in the tree, and no one is listening but me."),
    ("Write a wish for a birthday.", "I wish you a happy birthday and a year full of joy."),
    ("Describe a forest.", "A forest is green and quiet, with tall trees and hidden animals."),
    ("Describe the ocean.", "The ocean is wide, deep and blue, and it is never at rest."),
    ("Explain gravity.", "Gravity is the force that pulls things toward each other."),
    ("Explain what a computer is.", "A computer is a machine that follows instructions quickly."),
    ("Explain how soap works.", "Soap grabs the dirt and the fat, and then water takes them away."),
]  # fmt: skip


def plain_answers() -> list[Pair]:
    """Every pair; always the same ones in the same order."""
    pairs = list(WRITTEN)
    for country, city in CAPITALS.items():
        question = f"What is the capital of {country}?"
        pairs.append((question, f"The capital of {country} is {city}."))
    for word, other in OPPOSITES.items():
        question = f"What is the opposite of {word}?"
        pairs.append((question, f"The opposite of {word} is {other}."))
    for animal, sound in SOUNDS.items():
        pairs.append((f"What sound does a {animal} make?", f"A {animal} {sound}."))
    for thing, colour in COLOURS.items():
        answer = f"{thing[0].upper()}{thing[1:]} is {colour}."
        pairs.append((f"What color is {thing}?", answer))
    for first in range(2, 6):
        for second in range(3, 9, 2):
            question = f"What is {first} plus {second}?"
            pairs.append((question, f"{first} plus {second} is {first + second}."))
    return pairs
