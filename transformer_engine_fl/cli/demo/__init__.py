"""The main job: a small transformer that trains on real text through the dispatcher."""
