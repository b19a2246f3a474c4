"""Texts of the benchmark's prompts: to be asked about and summed up, to be edited, to be read data from."""

from __future__ import annotations

PASSAGES = (
    """The harbour of Brenmouth was built in 1852, when the railway reached the coast and the coal of the
inland pits needed a way to the sea. Two stone piers, each 400 metres long, were finished after nine
years of work. In its best year, 1913, the harbour shipped two million tonnes of coal. After the last pit
closed in 1984 the docks stood empty for a decade. Today the northern basin is a marina with 320 berths,
and the old customs house is a museum that is open from April to October. The museum shows models of coal
ships and a diving suit of 1890.""",
    """Honeybees keep their brood at 35 degrees all year round. In summer they carry water into the hive
and fan it with their wings, and the evaporating water cools the combs. In winter they gather in a tight
cluster and shiver with their flight muscles; the queen sits in the middle, where it is warmest. A
cluster of ten thousand bees uses about one kilogram of honey a month. Beekeepers therefore leave at
least fifteen kilograms in each hive in autumn. A colony that starves does so mostly in March, when the
brood needs warmth but no flowers are open yet.""",
    """The city council decided on Tuesday to close Mill Street to cars from 1 June. The trial will last
for six months. Buses, bicycles and deliveries before ten in the morning stay allowed. Shopkeepers had
asked for more parking at the station, and the council agreed to add ninety spaces there. Councillor Ines
Duarte, who proposed the trial, said that the street carries eleven thousand cars a day, and that most of
them only pass through. The opposition voted against it. The council will count visitors each week and
publish the numbers in December.""",
    """A heat pump moves heat instead of making it. It lets a liquid evaporate at a low pressure, where
the outside air is warm enough to boil it, and then compresses the vapour, which makes it hot. The hot
vapour gives its heat to the water of the heating and becomes liquid again. For one kilowatt hour of
electricity a good pump delivers three to four kilowatt hours of heat. The colder the air and the hotter
the water, the less it delivers. Large radiators, which need water of 40 degrees only, are therefore
better than small ones, which need 60.""",
    """The library of Sankt Alban holds 170,000 volumes, among them 2,100 manuscripts from before the
year 1500. The oldest one is a book of psalms, written about 760 on calfskin. In 1755 the hall was
rebuilt with a wooden floor of pine and walnut, and visitors have to wear felt slippers on it. The fire
of 1831 destroyed the eastern wing, but the monks had carried the manuscripts into the church. Since 2006
every manuscript is being photographed. The pictures can be seen free of charge on the library's web
page, and about one third of the work is done.""",
    """Sourdough bread rises by wild yeasts and bacteria that live in a mixture of flour and water. The
baker feeds the mixture once a day with equal parts of both. The yeasts make the gas that lifts the
dough, and the bacteria make the acids that give the bread its taste and keep it from moulding. A dough
at 24 degrees needs about four hours for its first rise. At 18 degrees it needs eight. The loaf is baked
at 240 degrees for twenty minutes and then at 210 degrees for thirty more. It should cool for an hour
before it is cut.""",
    """The probe Meridian was launched on 14 March and will reach the asteroid Tessa in nineteen months.
It weighs 640 kilograms and carries three instruments: a camera, a laser that measures heights, and a
spectrometer that tells which minerals the surface is made of. Tessa is 900 metres long and turns once in
seven hours. For five months the probe will circle it at a distance of two kilometres. Then it will land
for a few seconds, take up to 200 grams of dust, and start its way home. The capsule with the dust should
fall into the desert four years after the launch.""",
    """In the valley of the Orsa floods used to come every spring. In 1962 a dam of earth was raised
above the village of Lenn, 38 metres high and 600 metres long. The lake behind it holds 90 million cubic
metres and gives drinking water to three towns. The dam's two turbines make 14 gigawatt hours a year,
enough for four thousand homes. The village of Altlenn, with its forty houses, was given up for the lake.
In dry summers the water falls so low that the walls of its church come to light, and visitors walk out
over the cracked mud to see them.""",
    """The company Northwind Tools had sales of 48 million euros last year, six percent more than the
year before. Garden tools grew by eleven percent, while the sales of drills fell by two. The profit was
3.1 million euros, after 3.4 million in the year before, because steel became dearer. The company employs
310 people, 220 of them in its plant in Velden. A second hall will be opened there in autumn and will
make batteries. Managing director Paul Renner expects sales of 51 million euros this year, and a profit
that is at least as high as last year's.""",
    """Swifts spend almost their whole life in the air. They eat, drink and sleep while they fly, and
some do not land for ten months. They come to Europe at the beginning of May and leave at the beginning
of August. A pair raises two or three young under the roof of a house or a tower. When it rains for days
and no insects fly, the parents travel several hundred kilometres around the bad weather, and the young
fall into a sleep that lets them live without food for a week. New buildings leave no gaps for them, so
many towns ask builders to put nesting boxes into the walls.""",
)

QUESTIONS = (
    "Why was the harbour built, and what is the northern basin today?",
    "How do bees keep the hive cool in summer and warm in winter?",
    "What stays allowed in Mill Street, and how long will the trial last?",
    "Why are large radiators better for a heat pump than small ones?",
    "What is the oldest manuscript, and why did the manuscripts survive the fire?",
    "What do the yeasts do, and what do the bacteria do?",
    "Which instruments does the probe carry, and what will it bring home?",
    "What does the lake give to the towns, and what happened to Altlenn?",
    "Why did the profit fall although the sales grew?",
    "What do swifts and their young do when it rains for days?",
)

CODE = (
    """class Counter:
    def __init__(self, start, step):
        self.value = start
        self.step = step
        self.history = []

    def increase(self):
        self.value += self.step
        self.history.append(self.value)
        return self.value

    def decrease(self):
        self.value -= self.step
        self.history.append(self.value)
        return self.value

    def reset(self):
        self.value = 0
        self.history = []
""",
    """def read_config(path):
    config = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, value = line.split("=", 1)
            config[name.strip()] = value.strip()
    return config


def write_config(path, config):
    with open(path, "w") as file:
        for name in sorted(config):
            file.write(name + " = " + config[name] + "\\n")
""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0
""",
    """def celsius_to_fahrenheit(degrees):
    return degrees * 9 / 5 + 32


def fahrenheit_to_celsius(degrees):
    return (degrees - 32) * 5 / 9


def print_table(first, last, step):
    degrees = first
    while degrees <= last:
        print(degrees, celsius_to_fahrenheit(degrees))
        degrees = degrees + step


print_table(0, 100, 10)
""",
    """import csv


def load_orders(path):
    orders = []
    with open(path) as file:
        for row in csv.DictReader(file):
            row["amount"] = int(row["amount"])
            row["price"] = float(row["price"])
            orders.append(row)
    return orders


def total(orders):
    result = 0.0
    for order in orders:
        result = result + order["amount"] * order["price"]
    return result
""",
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
""",
    """function groupByYear(books) {
  const groups = {};
  for (const book of books) {
    if (!groups[book.year]) {
      groups[book.year] = [];
    }
    groups[book.year].push(book);
  }
  return groups;
}

function countByYear(books) {
  const counts = {};
  for (const book of books) {
    counts[book.year] = (counts[book.year] || 0) + 1;
  }
  return counts;
}
""",
    """def binary_search(values, wanted):
    low = 0
    high = len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return None


def insert_sorted(values, value):
    place = 0
    while place < len(values) and values[place] < value:
        place = place + 1
    values.insert(place, value)
""",
    """class Cache:
    def __init__(self, max_entries):
        self.max_entries = max_entries
        self.entries = {}

    def get(self, key):
        if key in self.entries:
            value = self.entries.pop(key)
            self.entries[key] = value
            return value
        return None

    def put(self, key, value):
        self.entries[key] = value
        if len(self.entries) > self.max_entries:
            oldest = next(iter(self.entries))
            del self.entries[oldest]
""",
    """SELECT customers.name, customers.city, SUM(orders.amount) AS total
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.date >= '2024-01-01'
GROUP BY customers.name, customers.city
HAVING SUM(orders.amount) > 1000
ORDER BY total DESC;

SELECT customers.name, customers.city, COUNT(orders.id) AS number
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.date >= '2024-01-01'
GROUP BY customers.name, customers.city
ORDER BY number DESC;
""",
)

RENAMES = (
    ("reset", "clear"),
    ("config", "options"),
    ("peek", "top"),
    ("print_table", "show_table"),
    ("total", "total_price"),
    ("balance", "funds"),
    ("groupByYear", "byYear"),
    ("wanted", "target"),
    ("max_entries", "limit"),
    ("total", "revenue"),
)

RECORDS = (
    (
        '{"name": "Carla Ruiz", "company": "Blue Door Architects", "email": "ruiz@bluedoor.example"}',
        "Carla Ruiz of Blue Door Architects, ruiz@bluedoor.example",
        """Martha Oldfield of Brightwater Logistics, martha.oldfield@brightwater.example
Jonas Petersen of Petersen and Sons Joinery, jonas@petersen-joinery.example
Aiko Tanabe of Harbour Light Publishing, tanabe@harbourlight.example""",
    ),
    (
        '{"product": "desk lamps with a clamp", "price": 27.50, "quantity": 8}',
        "8 desk lamps with a clamp at 27.50 euros each",
        """12 boxes of recycled printing paper at 4.90 euros each
3 adjustable standing desks at 389.00 euros each
40 packets of whiteboard markers at 2.35 euros each""",
    ),
    (
        '{"title": "Letters from the Ferry", "author": "Sven Aalto", "year": 1974}',
        "Letters from the Ferry, written by Sven Aalto in 1974",
        """The Salt Road to Kemlin, written by Edith Marlowe in 1962
A Short History of Lighthouses, written by Thomas Arkwright in 1988
Gardens without Water, written by Leila Haddad in 2015""",
    ),
    (
        '{"flight": "NW 105", "departure": "06:10", "destination": "Valencia"}',
        "Flight NW 105 leaves Antwerp at 06:10 for Valencia",
        """Flight NW 412 leaves Hamburg at 07:25 for Lisbon
Flight NW 633 leaves Copenhagen at 11:40 for Thessaloniki
Flight NW 871 leaves Manchester at 19:05 for Reykjavik""",
    ),
    (
        '{"patient": "Ms Okafor", "symptom": "an itching rash on both arms", "medicine": "cortisone cream"}',
        "Ms Okafor has an itching rash on both arms and gets cortisone cream",
        """Mr Adeyemi has had a dry cough for two weeks and gets codeine drops
Mrs Lindqvist suffers from migraine with aura and gets sumatriptan
Mr Castellano has a swollen left ankle and gets ibuprofen gel""",
    ),
    (
        '{"time": "2024-05-02T08:13:55", "level": "INFO", "message": "job 417 of queue reports started"}',
        "2024-05-02T08:13:55 INFO job 417 of queue reports started",
        """2024-05-02T08:14:07 ERROR connection to database lost after 30 seconds
2024-05-02T08:14:09 WARNING retrying connection to database, attempt 2 of 5
2024-05-02T08:14:12 INFO connection to database established""",
    ),
    (
        '{"species": "common bream", "length": "70 centimetres", "habitat": "slow rivers"}',
        "The common bream grows to 70 centimetres and lives in slow rivers",
        """The northern pike grows to 120 centimetres and lives in weedy lakes
The brown trout grows to 60 centimetres and lives in cold streams
The European eel grows to 90 centimetres and lives in muddy rivers""",
    ),
    (
        '{"event": "winter reading", "date": "9 January", "place": "the back room of the Red Lion"}',
        "The winter reading is on 9 January in the back room of the Red Lion",
        """The spring concert is on 12 April in the Church of Saint Nicholas
The summer market is on 21 June in the courtyard of the old brewery
The autumn lecture is on 4 October in the reading room of the town library""",
    ),
    (
        '{"invoice": "2024-0380", "customer": "Old Town Bicycle Workshop", "amount": "412.30 euros"}',
        "Invoice 2024-0380 to Old Town Bicycle Workshop over 412.30 euros",
        """Invoice 2024-0381 to Greenfield Dairy Cooperative over 1,284.50 euros
Invoice 2024-0382 to Mountain View Dental Practice over 640.00 euros
Invoice 2024-0383 to Riverside Community Theatre over 2,917.80 euros""",
    ),
    (
        '{"team": "Foxes of Kingsport", "opponent": "Wolves of Eastvale", "result": "2 to 1"}',
        "The Foxes of Kingsport won against the Wolves of Eastvale by 2 to 1",
        """The Falcons of Westbridge won against the Otters of Lakeside by 3 to 1
The Rovers of Millbrook drew with the Badgers of Highfield at 2 to 2
The Herons of Seaton lost against the Lynxes of Northgate by 0 to 4""",
    ),
)
