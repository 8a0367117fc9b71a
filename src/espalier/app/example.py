import torch
from sklearn.datasets import load_digits

import espalier

images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
images = images.float() / 16
train, test = torch.randperm(1797).split(1500)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = espalier.RAMDA(espalier.regularize(model, espalier.GroupLasso(1e-3)), lr=1e-2)
schedule = espalier.StagewiseRestart(optimizer, milestones=[20, 40])
for _ in range(60):
    for batch in train[torch.randperm(1500)].split(100):
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    schedule.step()
print(espalier.structure(optimizer))
print(f"accuracy {(model(images[test]).argmax(1) == labels[test]).float().mean():.1%} on {len(test)} unseen digits")
with optimizer.structured():
    print(espalier.shrink(model, images[:1]))
