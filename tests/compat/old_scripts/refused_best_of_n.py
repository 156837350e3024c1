# refused: BestOfNSampler.*posttrain.complete
from trl.extras import BestOfNSampler
from trl.core import LengthSampler

best_of_n = BestOfNSampler(None, None, None, length_sampler=LengthSampler(4, 8))
