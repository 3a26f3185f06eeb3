package policy

// RendezvousRank ranks a backend for a key: the highest wins. The mixer is the finalizer of SplitMix64.
func RendezvousRank(key, nameHash uint64) uint64 {
	x := key ^ nameHash
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
