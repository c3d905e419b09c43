"""`expertmesh plan`: reads the model, has layouts searched, prints what was found."""
