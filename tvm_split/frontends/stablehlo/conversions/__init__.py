"""Operations of StableHLO as operators of Relax, by family."""
