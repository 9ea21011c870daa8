"""A whole nn.Module in chosen formats: `simulate`, `restore`, and policies that change formats while a model trains."""

from lowp.simulate.policies import GradientDiversity as GradientDiversity
from lowp.simulate.policies import OnOverflow as OnOverflow
from lowp.simulate.policies import Schedule as Schedule
from lowp.simulate.simulation import Simulation as Simulation
from lowp.simulate.simulation import restore as restore
from lowp.simulate.simulation import simulate as simulate
from lowp.simulate.simulation import simulation_of as simulation_of
