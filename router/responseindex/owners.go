package responseindex

import (
	"container/heap"
	"container/list"
)

// owners is the records of an Index by their owners. The owner with the most is found at once.
type owners struct {
	byName map[string]*ownerRecords
	heap   mostRecordsFirst
	uses   uint64 // of all records so far
}

// ownerRecords is the records of one owner, at least one, the least recently used first.
type ownerRecords struct {
	records   *list.List // of *record
	heapIndex int
}

func newOwners() owners { return owners{byName: map[string]*ownerRecords{}} }

func (o *owners) add(r *record) {
	o.uses++
	r.use = o.uses
	of := o.byName[r.Owner]
	if of == nil {
		of = &ownerRecords{records: list.New()}
		o.byName[r.Owner] = of
		r.element = of.records.PushBack(r)
		heap.Push(&o.heap, of)
		return
	}
	r.element = of.records.PushBack(r)
	heap.Fix(&o.heap, of.heapIndex)
}

// recordUse makes a record the most recently used one of its owner.
func (o *owners) recordUse(r *record) {
	o.uses++
	r.use = o.uses
	of := o.byName[r.Owner]
	of.records.MoveToBack(r.element)
	heap.Fix(&o.heap, of.heapIndex)
}

// remove removes a record.
func (o *owners) remove(r *record) {
	of := o.byName[r.Owner]
	if of.records.Len() == 1 {
		heap.Remove(&o.heap, of.heapIndex)
		delete(o.byName, r.Owner)
	} else {
		of.records.Remove(r.element)
		heap.Fix(&o.heap, of.heapIndex)
	}
	r.element = nil
}

// oldestOfLargest returns the least recently used record of the owner with the most records; of several
// such owners, of the one whose record was used least recently. There must be a record.
func (o *owners) oldestOfLargest() *record { return o.heap[0].oldest() }

func (o *ownerRecords) oldest() *record { return o.records.Front().Value.(*record) }

// mostRecordsFirst implements heap.Interface, as its name says; of owners with equally many, the one with the oldest record is first.
type mostRecordsFirst []*ownerRecords

func (h mostRecordsFirst) Len() int { return len(h) }

func (h mostRecordsFirst) Less(i, j int) bool {
	if a, b := h[i].records.Len(), h[j].records.Len(); a != b {
		return a > b
	}
	return h[i].oldest().use < h[j].oldest().use
}

func (h mostRecordsFirst) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].heapIndex, h[j].heapIndex = i, j
}

func (h *mostRecordsFirst) Push(of any) {
	of.(*ownerRecords).heapIndex = len(*h)
	*h = append(*h, of.(*ownerRecords))
}

func (h *mostRecordsFirst) Pop() any {
	last := len(*h) - 1
	of := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return of
}
