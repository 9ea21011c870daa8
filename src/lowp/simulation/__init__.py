"""A whole nn.Module in chosen formats: `simulate`, `restore`, and policies that change formats while a model trains."""

from lowp.simulation.policies import GradientDiversity as GradientDiversity
from lowp.simulation.policies import OnOverflow as OnOverflow
from lowp.simulation.policies import Schedule as Schedule
from lowp.simulation.simulate import Simulation as Simulation
from lowp.simulation.simulate import restore as restore
from lowp.simulation.simulate import simulate as simulate
from lowp.simulation.simulate import simulation_of as simulation_of
