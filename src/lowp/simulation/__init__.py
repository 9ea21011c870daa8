"""A whole nn.Module in chosen formats: `simulate`, `restore`, policies that change formats while a model trains, `search`."""

from lowp.simulation.calibration import calibrate as calibrate
from lowp.simulation.describe import describe as describe
from lowp.simulation.frontier import SearchResult as SearchResult
from lowp.simulation.master import MasterWeights as MasterWeights
from lowp.simulation.policies import GradientDiversity as GradientDiversity
from lowp.simulation.policies import MemoryBudget as MemoryBudget
from lowp.simulation.policies import OnOverflow as OnOverflow
from lowp.simulation.policies import PerLayer as PerLayer
from lowp.simulation.policies import Policy as Policy
from lowp.simulation.policies import Schedule as Schedule
from lowp.simulation.policies import Together as Together
from lowp.simulation.policies import Uniform as Uniform
from lowp.simulation.products import Products as Products
from lowp.simulation.search import search as search
from lowp.simulation.simulate import Simulation as Simulation
from lowp.simulation.simulate import restore as restore
from lowp.simulation.simulate import simulate as simulate
from lowp.simulation.simulate import simulation_of as simulation_of
